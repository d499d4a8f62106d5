"""What a run is worth: reports that compare runs, and the demo."""
