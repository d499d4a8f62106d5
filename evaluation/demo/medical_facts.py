"""The small medical world of the sample corpus: the symptoms, test, finding, drugs and laboratory value of each disease.

The names are real generic names. Their combinations are simple, so that a small model can learn them; they are no source of
medical knowledge. French words carry their gender as "f " or "m " (plural "fp ", "mp "); `grammar` makes articles from it.
"""

from dataclasses import dataclass

SPECIALTIES = {
    "heart": ("cardiology", "cardiologie"),
    "lung": ("pulmonology", "pneumologie"),
    "gut": ("gastroenterology", "gastro-entérologie"),
    "brain": ("neurology", "neurologie"),
    "gland": ("endocrinology", "endocrinologie"),
    "joint": ("rheumatology", "rhumatologie"),
    "skin": ("dermatology", "dermatologie"),
    "kidney": ("nephrology", "néphrologie"),
    "prostate": ("urology", "urologie"),
    "blood": ("haematology", "hématologie"),
    "tumour": ("oncology", "oncologie"),
    "infection": ("infectious diseases", "maladies infectieuses"),
    "mind": ("psychiatry", "psychiatrie"),
    "eye": ("ophthalmology", "ophtalmologie"),
}

# key: English; French with gender.
SYMPTOMS = """
abdominal cramps; fp crampes abdominales        | abdominal distension; f distension abdominale
abdominal pain; fp douleurs abdominales         | ankle swelling; mp œdèmes des chevilles
back pain; f lombalgie                          | black stools; mp selles noires
bloody diarrhoea; f diarrhée sanglante          | blurred vision; f vision floue
bone pain; fp douleurs osseuses                 | breast lump; f masse du sein
burning urination; fp brûlures mictionnelles    | butterfly rash; f éruption en ailes de papillon
calf pain; f douleur du mollet                  | chest pain; f douleur thoracique
chest tightness; f oppression thoracique        | chills; mp frissons
cold intolerance; f frilosité                   | confusion; f confusion
constipation; f constipation                    | dark urine; fp urines foncées
diarrhoea; f diarrhée                           | difficulty swallowing; f dysphagie
disorientation; f désorientation                | dizziness; mp vertiges
double vision; f diplopie                       | drooping eyelids; m ptosis
dry cough; f toux sèche                         | dry skin; f sécheresse cutanée
elated mood; f exaltation de l'humeur           | enlarged hands; m élargissement des mains
epigastric pain; f douleur épigastrique         | expanding rash; m érythème migrant
exertional dyspnoea; f dyspnée d'effort         | eye pain; f douleur oculaire
eyelid swelling; m œdème des paupières          | facial droop; f paralysie faciale
fatigue; f fatigue                              | fever; f fièvre
flank pain; f douleur lombaire                  | foamy urine; fp urines mousseuses
frequent urination; f polyurie                  | haemoptysis; f hémoptysie
hair loss; f chute de cheveux                   | halos around lights; mp halos colorés
hallucinations; fp hallucinations               | headache; fp céphalées
height loss; f perte de taille                  | insomnia; f insomnie
itching; m prurit                               | jaundice; m ictère
jaw pain; f douleur de la mâchoire              | joint pain; fp douleurs articulaires
joint swelling; m gonflement articulaire        | leg swelling; m œdème de la jambe
loss of appetite; f perte d'appétit             | low mood; f tristesse de l'humeur
memory loss; fp pertes de mémoire               | morning stiffness; f raideur matinale
nail pitting; fp dépressions ponctuées des ongles | nausea; fp nausées
neck lump; f masse cervicale                    | neck stiffness; f raideur de la nuque
night sweats; fp sueurs nocturnes               | nipple discharge; m écoulement mamelonnaire
numbness of the legs; m engourdissement des jambes | oral thrush; m muguet buccal
orthopnoea; f orthopnée                         | pallor; f pâleur
palpitations; fp palpitations                   | photophobia; f photophobie
pigmented skin lesion; f lésion cutanée pigmentée | pleuritic chest pain; f douleur pleurale
productive cough; f toux productive             | rectal bleeding; fp rectorragies
resting tremor; m tremblement de repos          | salt craving; f appétence pour le sel
scaly plaques; fp plaques squameuses            | seizures; fp crises convulsives
skin darkening; f mélanodermie                  | skin nodules; mp nodules cutanés
skin redness; m érythème                        | slowness of movement; f lenteur des mouvements
slurred speech; f dysarthrie                    | sudden dyspnoea; f dyspnée brutale
suspiciousness; f méfiance                      | sweating; fp sueurs
temporal headache; fp céphalées temporales      | thirst; f soif
tingling of the feet; fp paresthésies des pieds | toe pain; f douleur du gros orteil
tongue biting; f morsure de langue              | tremor of the hands; m tremblement des mains
unsteady gait; f démarche instable              | vesicles; fp vésicules
vomiting; mp vomissements                       | watery diarrhoea; f diarrhée liquide
weak urine stream; f dysurie                    | weakness of the right arm; f faiblesse du bras droit
weight gain; f prise de poids                   | weight loss; m amaigrissement
wheezing; mp sifflements                        | night urination; f nycturie
"""

# key: English; French with gender; unit; range when ill; range when well; decimals.
LABS = """
ACE; angiotensin-converting enzyme; f enzyme de conversion; U/L; 80-160; 20-50; 0
albumin; albumin; f albuminémie; g/L; 15-24; 36-45; 0
ALT; ALT; fp ALAT; U/L; 180-900; 15-40; 0
antibodies; anti-receptor antibody level; m taux d'anticorps antirécepteurs; nmol/L; 4-25; 0.1-0.4; 1
bilirubin; bilirubin; f bilirubine; µmol/L; 45-190; 6-18; 0
calcium; calcium; f calcémie; mmol/L; 2.8-3.6; 2.2-2.5; 2
calprotectin; faecal calprotectin; f calprotectine fécale; µg/g; 400-1800; 20-50; 0
CA153; CA 15-3; m CA 15-3; U/mL; 60-240; 8-25; 0
CD4; CD4 count; m taux de CD4; cells/µL; 40-190; 480-900; 0
CEA; carcinoembryonic antigen; m antigène carcino-embryonnaire; µg/L; 12-90; 1-4; 0
cholesterol; LDL cholesterol; m cholestérol LDL; g/L; 1.7-2.6; 0.5-0.8; 2
cortisol; morning cortisol; f cortisolémie matinale; nmol/L; 20-90; 250-500; 0
creatinine; creatinine; f créatinine; µmol/L; 150-320; 60-95; 0
CRP; C-reactive protein; f protéine C réactive; mg/L; 60-290; 1-5; 0
Ddimer; D-dimer level; m taux de D-dimères; µg/L; 1500-6800; 150-480; 0
DNA; anti-DNA antibody level; m taux d'anticorps anti-ADN; IU/mL; 60-280; 5-15; 0
eosinophils; eosinophil count; m taux d'éosinophiles; cells/µL; 600-1900; 80-300; 0
ESR; erythrocyte sedimentation rate; f vitesse de sédimentation; mm/h; 55-110; 4-15; 0
haemoglobin; haemoglobin; f hémoglobine; g/dL; 6.2-8.9; 12.5-15; 1
HbA1c; HbA1c; f HbA1c; %; 8.4-12.6; 6.1-6.9; 1
IGF1; IGF-1; m IGF-1; ng/mL; 520-980; 90-230; 0
IgE; total IgE; fp IgE totales; IU/mL; 400-2600; 20-90; 0
lactate; lactate; m lactate; mmol/L; 3.1-7.8; 0.6-1.6; 1
LDH; lactate dehydrogenase; f lactate déshydrogénase; U/L; 340-780; 140-220; 0
lipase; lipase; f lipase; U/L; 420-2600; 15-55; 0
NTproBNP; NT-proBNP; m NT-proBNP; ng/L; 1900-9800; 60-280; 0
pCO2; partial pressure of carbon dioxide; f pression partielle en gaz carbonique; mmHg; 52-74; 37-43; 0
platelets; platelet count; m taux de plaquettes; G/L; 28-88; 170-340; 0
pressure; systolic blood pressure; f pression artérielle systolique; mmHg; 172-218; 118-134; 0
eyepressure; intraocular pressure; f pression intraoculaire; mmHg; 28-44; 12-17; 0
procalcitonin; procalcitonin; f procalcitonine; µg/L; 2.4-28; 0.1-0.2; 1
PSA; prostate-specific antigen; m antigène prostatique spécifique; µg/L; 8-62; 0.4-2.4; 1
rate; heart rate; f fréquence cardiaque; bpm; 118-164; 62-78; 0
RF; rheumatoid factor; m facteur rhumatoïde; IU/mL; 60-310; 6-14; 0
T4; free thyroxine; f thyroxine libre; pmol/L; 34-72; 12-19; 0
troponin; troponin; f troponine; ng/L; 340-5200; 4-12; 0
TSH; thyrotropin; f thyréostimuline; mIU/L; 14-88; 1.1-3.4; 1
urate; uric acid; f uricémie; µmol/L; 520-740; 240-340; 0
B12; vitamin B12; f vitamine B12; pmol/L; 40-95; 260-480; 0
vitaminD; vitamin D; f vitamine D; nmol/L; 12-30; 75-120; 0
leucocytes; white cell count; m taux de leucocytes; G/L; 17-96; 5-9; 1
"""

# English; French with gender; specialty; symptoms; test; finding; first drug; second drug; lab. A slash parts English from French.
DISEASES = """
heart failure; f insuffisance cardiaque; heart; exertional dyspnoea, ankle swelling, orthopnoea, fatigue; echocardiography/f échocardiographie; a reduced ejection fraction/une fraction d'éjection réduite; furosemide/furosémide; bisoprolol; NTproBNP
atrial fibrillation; f fibrillation atriale; heart; palpitations, dizziness, fatigue; an electrocardiogram/m électrocardiogramme; an irregular rhythm without P waves/un rythme irrégulier sans onde P; apixaban; amiodarone; rate
myocardial infarction; m infarctus du myocarde; heart; chest pain, sweating, nausea; coronary angiography/f coronarographie; an occluded coronary artery/une artère coronaire occluse; aspirin/aspirine; ticagrelor; troponin
acute pericarditis; f péricardite aiguë; heart; pleuritic chest pain, fever, fatigue; echocardiography/f échocardiographie; a pericardial effusion/un épanchement péricardique; colchicine; ibuprofen/ibuprofène; CRP
arterial hypertension; f hypertension artérielle; heart; headache, blurred vision, dizziness; fundoscopy/m fond d'œil; narrowed retinal arteries/des artères rétiniennes rétrécies; amlodipine; ramipril; pressure
deep vein thrombosis; f thrombose veineuse profonde; heart; calf pain, leg swelling; Doppler ultrasound/m écho-Doppler; a non-compressible femoral vein/une veine fémorale incompressible; rivaroxaban; warfarin/warfarine; Ddimer
pulmonary embolism; f embolie pulmonaire; lung; sudden dyspnoea, pleuritic chest pain, haemoptysis; CT angiography/m angioscanner; a clot in the right pulmonary artery/un caillot dans l'artère pulmonaire droite; heparin/héparine; warfarin/warfarine; Ddimer
infective endocarditis; f endocardite infectieuse; infection; fever, weight loss, night sweats, chills; transoesophageal echocardiography/f échocardiographie transœsophagienne; a vegetation on the mitral valve/une végétation sur la valve mitrale; daptomycin/daptomycine; gentamicin/gentamicine; procalcitonin
asthma; m asthme; lung; wheezing, dry cough, chest tightness; spirometry/f spirométrie; a reversible obstruction/une obstruction réversible; budesonide/budésonide; salbutamol; eosinophils
chronic obstructive pulmonary disease; f bronchopneumopathie chronique obstructive; lung; productive cough, exertional dyspnoea, wheezing; spirometry/f spirométrie; a fixed obstruction/une obstruction fixe; tiotropium; salbutamol; pCO2
bacterial pneumonia; f pneumonie bactérienne; lung; fever, productive cough, pleuritic chest pain, chills; a chest radiograph/f radiographie thoracique; a consolidation of the right lower lobe/une condensation du lobe inférieur droit; amoxicillin/amoxicilline; levofloxacin/lévofloxacine; CRP
pulmonary tuberculosis; f tuberculose pulmonaire; lung; night sweats, weight loss, haemoptysis, fever; a chest CT/m scanner thoracique; a cavity in the left upper lobe/une caverne du lobe supérieur gauche; isoniazid/isoniazide; rifampicin/rifampicine; ESR
pulmonary fibrosis; f fibrose pulmonaire; lung; dry cough, exertional dyspnoea, fatigue; a high-resolution CT/m scanner en haute résolution; a honeycomb pattern/un aspect en rayon de miel; pirfenidone/pirfénidone; nintedanib; LDH
sarcoidosis; f sarcoïdose; lung; dry cough, skin nodules, fatigue; a bronchial biopsy/f biopsie bronchique; granulomas without necrosis/des granulomes sans nécrose; prednisone; methotrexate/méthotrexate; ACE
Crohn's disease; f maladie de Crohn; gut; diarrhoea, abdominal pain, weight loss; colonoscopy/f coloscopie; deep ulcers of the terminal ileum/des ulcères profonds de l'iléon terminal; infliximab; azathioprine; calprotectin
ulcerative colitis; f rectocolite hémorragique; gut; bloody diarrhoea, rectal bleeding, abdominal cramps; colonoscopy/f coloscopie; a continuous inflammation of the rectum/une inflammation continue du rectum; mesalazine/mésalazine; vedolizumab/védolizumab; calprotectin
gastric ulcer; m ulcère gastrique; gut; epigastric pain, black stools, nausea; gastroscopy/f gastroscopie; an ulcer of the antrum/un ulcère de l'antre; omeprazole/oméprazole; clarithromycin/clarithromycine; haemoglobin
acute pancreatitis; f pancréatite aiguë; gut; epigastric pain, vomiting, nausea; an abdominal CT/m scanner abdominal; a swollen pancreas/un pancréas œdématié; morphine; paracetamol/paracétamol; lipase
hepatitis B; f hépatite B; gut; jaundice, fatigue, dark urine; a liver biopsy/f biopsie hépatique; a portal inflammation/une inflammation portale; entecavir/entécavir; tenofovir/ténofovir; ALT
liver cirrhosis; f cirrhose hépatique; gut; abdominal distension, jaundice, ankle swelling; an abdominal ultrasound/f échographie abdominale; a nodular liver/un foie nodulaire; spironolactone; propranolol; bilirubin
clostridial colitis; f colite à clostridium; gut; watery diarrhoea, fever, abdominal cramps; a stool test/m examen des selles; a positive toxin/une toxine positive; fidaxomicin/fidaxomicine; vancomycin/vancomycine; leucocytes
acute cholangitis; f angiocholite aiguë; gut; jaundice, fever, abdominal pain; MR cholangiography/f cholangio-IRM; a stone in the bile duct/un calcul de la voie biliaire; piperacillin/pipéracilline; metronidazole/métronidazole; bilirubin
epilepsy; f épilepsie; brain; seizures, confusion, tongue biting; an electroencephalogram/m électroencéphalogramme; spikes in the left temporal lobe/des pointes temporales gauches; levetiracetam/lévétiracétam; lamotrigine; lactate
Parkinson's disease; f maladie de Parkinson; brain; resting tremor, slowness of movement, constipation; dopamine scintigraphy/f scintigraphie dopaminergique; a reduced uptake in the putamen/une fixation diminuée du putamen; levodopa/lévodopa; pramipexole; vitaminD
multiple sclerosis; f sclérose en plaques; brain; blurred vision, numbness of the legs, unsteady gait; a brain MRI/f IRM cérébrale; periventricular plaques/des plaques périventriculaires; natalizumab; methylprednisolone/méthylprednisolone; vitaminD
migraine; f migraine; brain; headache, nausea, photophobia; a brain MRI/f IRM cérébrale; a normal brain/un cerveau normal; sumatriptan; topiramate; -
bacterial meningitis; f méningite bactérienne; infection; fever, neck stiffness, photophobia, headache; a lumbar puncture/f ponction lombaire; a cloudy fluid/un liquide trouble; ceftriaxone; dexamethasone/dexaméthasone; procalcitonin
myasthenia gravis; f myasthénie; brain; double vision, drooping eyelids, difficulty swallowing; electromyography/m électromyogramme; a decrement on repeated stimulation/un décrément à la stimulation répétée; pyridostigmine; azathioprine; antibodies
ischaemic stroke; m infarctus cérébral; brain; weakness of the right arm, slurred speech, facial droop; a brain CT/m scanner cérébral; an occluded cerebral artery/une artère cérébrale occluse; alteplase/altéplase; clopidogrel; cholesterol
Alzheimer's disease; f maladie d'Alzheimer; brain; memory loss, disorientation, confusion; a brain MRI/f IRM cérébrale; an atrophy of the hippocampus/une atrophie de l'hippocampe; donepezil/donépézil; memantine/mémantine; -
type 2 diabetes; m diabète de type 2; gland; thirst, frequent urination, fatigue; a glucose tolerance test/f hyperglycémie provoquée; a high glucose at two hours/une glycémie élevée à deux heures; metformin/metformine; empagliflozin/empagliflozine; HbA1c
hypothyroidism; f hypothyroïdie; gland; fatigue, weight gain, cold intolerance, constipation; a thyroid ultrasound/f échographie thyroïdienne; a small uneven gland/une petite glande hétérogène; levothyroxine/lévothyroxine; liothyronine; TSH
Graves' disease; f maladie de Basedow; gland; palpitations, weight loss, tremor of the hands; thyroid scintigraphy/f scintigraphie thyroïdienne; a diffuse high uptake/une fixation diffuse élevée; carbimazole; propranolol; T4
Addison's disease; f maladie d'Addison; gland; fatigue, salt craving, skin darkening; a stimulation test/m test de stimulation; a flat cortisol response/une réponse plate du cortisol; hydrocortisone; fludrocortisone; cortisol
acromegaly; f acromégalie; gland; enlarged hands, headache, sweating; a pituitary MRI/f IRM hypophysaire; a pituitary adenoma/un adénome hypophysaire; octreotide/octréotide; cabergoline; IGF1
gout; f goutte; joint; toe pain, joint swelling, skin redness; a joint aspiration/f ponction articulaire; urate crystals/des cristaux d'urate; allopurinol; colchicine; urate
osteoporosis; f ostéoporose; joint; back pain, height loss; bone densitometry/f densitométrie osseuse; a low bone density/une densité osseuse basse; zoledronate/zolédronate; teriparatide/tériparatide; vitaminD
rheumatoid arthritis; f polyarthrite rhumatoïde; joint; morning stiffness, joint swelling, fatigue; a hand radiograph/f radiographie des mains; marginal erosions/des érosions marginales; methotrexate/méthotrexate; adalimumab; RF
systemic lupus; m lupus systémique; joint; butterfly rash, joint pain, hair loss; a kidney biopsy/f biopsie rénale; mesangial deposits/des dépôts mésangiaux; hydroxychloroquine; mycophenolate/mycophénolate; DNA
giant cell arteritis; f artérite à cellules géantes; joint; temporal headache, jaw pain, blurred vision; a temporal artery biopsy/f biopsie de l'artère temporale; giant cells in the arterial wall/des cellules géantes dans la paroi artérielle; tocilizumab; prednisone; ESR
psoriasis; m psoriasis; skin; scaly plaques, itching, nail pitting; a skin biopsy/f biopsie cutanée; a thickened epidermis/un épiderme épaissi; calcipotriol; secukinumab/sécukinumab; -
atopic dermatitis; f dermatite atopique; skin; itching, dry skin, skin redness; a patch test/m test épicutané; several positive reactions/plusieurs réactions positives; dupilumab; tacrolimus; IgE
acute pyelonephritis; f pyélonéphrite aiguë; kidney; fever, flank pain, burning urination, chills; a urine culture/f culture d'urine; Escherichia coli/Escherichia coli; ciprofloxacin/ciprofloxacine; cefotaxime/céfotaxime; CRP
nephrotic syndrome; m syndrome néphrotique; kidney; eyelid swelling, foamy urine, weight gain; a kidney biopsy/f biopsie rénale; fused podocytes/des podocytes fusionnés; rituximab; ciclosporin/ciclosporine; albumin
kidney stone; m calcul rénal; kidney; flank pain, vomiting, burning urination; an abdominal CT/m scanner abdominal; a stone in the left ureter/un calcul de l'uretère gauche; ketoprofen/kétoprofène; tamsulosin/tamsulosine; creatinine
prostatic hyperplasia; f hypertrophie de la prostate; prostate; weak urine stream, night urination, frequent urination; a prostate ultrasound/f échographie prostatique; an enlarged prostate/une prostate augmentée de volume; tamsulosin/tamsulosine; finasteride/finastéride; PSA
prostate cancer; m cancer de la prostate; prostate; weak urine stream, bone pain, weight loss; a prostate biopsy/f biopsie prostatique; an adenocarcinoma of both lobes/un adénocarcinome des deux lobes; bicalutamide; docetaxel/docétaxel; PSA
breast cancer; m cancer du sein; tumour; breast lump, nipple discharge, fatigue; mammography/f mammographie; a spiculated mass/une masse spiculée; tamoxifen/tamoxifène; letrozole/létrozole; CA153
colon cancer; m cancer du côlon; tumour; rectal bleeding, constipation, weight loss; colonoscopy/f coloscopie; a mass of the sigmoid colon/une masse du côlon sigmoïde; oxaliplatin/oxaliplatine; bevacizumab/bévacizumab; CEA
lung cancer; m cancer du poumon; tumour; haemoptysis, weight loss, productive cough; a lung biopsy/f biopsie pulmonaire; an adenocarcinoma with a mutation/un adénocarcinome avec une mutation; osimertinib; pembrolizumab; CEA
melanoma; m mélanome; tumour; pigmented skin lesion, itching; an excision biopsy/f biopsie-exérèse; atypical melanocytes/des mélanocytes atypiques; nivolumab; ipilimumab; LDH
pernicious anaemia; f anémie de Biermer; blood; fatigue, pallor, tingling of the feet; gastroscopy/f gastroscopie; an atrophic mucosa/une muqueuse atrophique; cyanocobalamin/cyanocobalamine; hydroxocobalamin/hydroxocobalamine; B12
chronic myeloid leukaemia; f leucémie myéloïde chronique; blood; fatigue, night sweats, abdominal distension; a bone marrow aspiration/m myélogramme; the BCR-ABL fusion/la fusion BCR-ABL; imatinib; dasatinib; leucocytes
multiple myeloma; m myélome multiple; blood; bone pain, fatigue, back pain; a bone marrow aspiration/m myélogramme; clonal plasma cells/des plasmocytes clonaux; bortezomib/bortézomib; lenalidomide/lénalidomide; calcium
Hodgkin lymphoma; m lymphome de Hodgkin; blood; neck lump, night sweats, itching; a lymph node biopsy/f biopsie ganglionnaire; Reed-Sternberg cells/des cellules de Reed-Sternberg; doxorubicin/doxorubicine; bleomycin/bléomycine; LDH
immune thrombocytopenia; f thrombopénie immunologique; blood; fatigue, rectal bleeding, skin redness; a bone marrow aspiration/m myélogramme; numerous megakaryocytes/de nombreux mégacaryocytes; eltrombopag; romiplostim; platelets
malaria; m paludisme; infection; fever, chills, headache, vomiting; a blood smear/m frottis sanguin; Plasmodium falciparum/Plasmodium falciparum; artesunate/artésunate; atovaquone; platelets
Lyme disease; f maladie de Lyme; infection; expanding rash, joint pain, fatigue; a serology/f sérologie; antibodies against Borrelia/des anticorps contre Borrelia; doxycycline; cefuroxime/céfuroxime; -
HIV infection; f infection par le VIH; infection; oral thrush, weight loss, fever; a viral load test/f charge virale; a high viral load/une charge virale élevée; dolutegravir/dolutégravir; emtricitabine; CD4
herpes zoster; m zona; infection; vesicles, itching, skin redness; a skin swab/m prélèvement cutané; the varicella virus/le virus de la varicelle; valaciclovir; pregabalin/prégabaline; -
major depression; f dépression majeure; mind; low mood, insomnia, loss of appetite; a questionnaire/m questionnaire; a high depression score/un score de dépression élevé; sertraline; mirtazapine; -
bipolar disorder; m trouble bipolaire; mind; elated mood, insomnia, weight loss; a clinical interview/m entretien clinique; a manic episode/un épisode maniaque; lithium; valproate; -
schizophrenia; f schizophrénie; mind; hallucinations, suspiciousness, insomnia; a clinical interview/m entretien clinique; disorganised thinking/une pensée désorganisée; risperidone/rispéridone; clozapine; -
glaucoma; m glaucome; eye; eye pain, halos around lights, blurred vision; tonometry/f tonométrie; a high pressure in both eyes/une pression élevée des deux yeux; latanoprost; timolol; eyepressure
"""

ONE_SEX = {"prostatic hyperplasia": "m", "prostate cancer": "m", "breast cancer": "f"}


@dataclass(frozen=True)
class Lab:
    en: str
    fr: str  # with gender
    unit: str
    ill: tuple[float, float]
    well: tuple[float, float]
    decimals: int


@dataclass(frozen=True)
class Disease:
    en: str
    fr: str  # with gender
    specialty: str  # key of SPECIALTIES
    symptoms: tuple[str, ...]  # keys of the symptoms
    test: tuple[str, str]  # English with its article, French with gender
    finding: tuple[str, str]  # with articles
    drug: tuple[str, str]  # the right answer to "treated with [MASK] for DISEASE"
    second_drug: tuple[str, str]
    lab: Lab | None
    sex: str | None  # "m" or "f" if only one sex has the disease


def _pair(text: str) -> tuple[str, str]:
    english, _, french = text.partition("/")
    return english, french or english


def _range(text: str) -> tuple[float, float]:
    low, high = text.split("-")
    return float(low), float(high)


def symptoms() -> dict[str, str]:
    """Map each symptom from English to French with its gender."""
    entries = [entry.split("; ") for line in SYMPTOMS.strip().splitlines() for entry in line.split("|")]
    return {english.strip(): french.strip() for english, french in entries}


def diseases() -> list[Disease]:
    labs = {}
    for line in LABS.strip().splitlines():
        key, english, french, unit, ill, well, decimals = line.split("; ")
        labs[key] = Lab(english, french, unit, _range(ill), _range(well), int(decimals))
    result = []
    for line in DISEASES.strip().splitlines():
        english, french, specialty, signs, test, finding, drug, second, lab = line.split("; ")
        result.append(
            Disease(
                en=english,
                fr=french,
                specialty=specialty,
                symptoms=tuple(signs.split(", ")),
                test=_pair(test),
                finding=_pair(finding),
                drug=_pair(drug),
                second_drug=_pair(second),
                lab=labs.get(lab),
                sex=ONE_SEX.get(english),
            )
        )
    return result
