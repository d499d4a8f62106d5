"""The numbers of docs/scaling.md: by calculation, and measured where one host can measure.

python -m benchmarks.scaling             everything by calculation
python -m benchmarks.scaling index       index.json at 50 B and 1 T tokens: its size, time and memory to open it, first order
python -m benchmarks.scaling store       how fast one process reads shards from a real S3 server on this host
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.run import SCRIPTS

ROW_LENGTH = 8192
SHARD = 67_108_864  # bytes: data_prep's --shard-size default
MODELS = {"base": 149_655_232, "large": 394_831_360}


def throughput() -> None:
    print("What n GPUs pull from the bucket (2 bytes a token, each row once an epoch)\n")
    print("| GPUs | 200 k tokens/s each | 400 k tokens/s each | shards of 64 MiB a minute |")
    print("|---|---|---|---|")
    for gpus in (1, 4, 8, 32, 128, 512):
        low, high = (gpus * rate * 2.0 for rate in (200_000, 400_000))
        print(
            f"| {gpus} | {low / 1e6:.1f} MB/s | {high / 1e6:.1f} MB/s | {low * 60 / SHARD:.1f} to {high * 60 / SHARD:.1f} |"
        )
    print(
        "\nEach node fetches each shard that its ranks need; the shuffle mixes over 65,536 rows, so every node needs nearly"
    )
    print("every shard: m nodes together pull m times the corpus an epoch.\n")
    print("| nodes of 8 GPUs | each node pulls | all pull, at 400 k tokens/s a GPU |")
    print("|---|---|---|")
    for nodes in (1, 4, 16, 64):
        each = nodes * 8 * 400_000 * 2.0
        print(f"| {nodes} | {each / 1e6:.1f} MB/s | {nodes * each / 1e6:,.1f} MB/s |")


def cache() -> None:
    row = ROW_LENGTH * 2
    window = 65_536 * row
    print("\nCache of a node, rows of 8,192 tokens (16 KiB)\n")
    print(f"shuffle block: 65,536 rows = {window / 1e9:.2f} GB = {window / SHARD:.0f} shards in use at a time")
    for gpus in (1, 8, 64):
        ahead = 4096 * gpus * row
        print(
            f"look-ahead of 4,096 rows a rank, {gpus} ranks: {ahead / 1e9:.2f} GB more; {4096 * ROW_LENGTH / 400_000:.0f} s ahead at 400 k tokens/s"
        )
    for tokens in (10e9, 50e9, 1e12):
        print(f"whole corpus of {tokens / 1e9:,.0f} B tokens: {tokens * 2 / 1e9:,.0f} GB")


def checkpoints() -> None:
    print("\nCheckpoints: 12 bytes a parameter at every ZeRO stage and number of ranks, written by rank 0\n")
    print(
        "| model | size | at 1 GB/s | at 5 GB/s | margin before the job's end (3 saves, a step of 1 s, 90 s for the scripts) at 1 GB/s |"
    )
    print("|---|---|---|---|---|")
    for name, parameters in {**MODELS, "1 B": 10**9, "3 B": 3 * 10**9}.items():
        size = 12 * parameters
        print(
            f"| {name} | {size / 1e9:.1f} GB | {size / 1e9:.0f} s | {size / 5e9:.1f} s | {3 * size / 1e9 + 1 + SCRIPTS:.0f} s |"
        )
    print(
        "\nModel state of a rank, bf16 with float32 masters (bytes a parameter: weights 2, gradients 4, masters and moments 12)\n"
    )
    print("| model | ranks | stage 1 | stage 2 | stage 3 |")
    print("|---|---|---|---|---|")
    for name, parameters in MODELS.items():
        for ranks in (4, 32):
            one, two, three = (6 + 12 / ranks, 2 + 16 / ranks, 18 / ranks)
            print(f"| {name} | {ranks} | {' | '.join(f'{parameters * b / 1e9:.2f} GB' for b in (one, two, three))} |")


def index() -> None:
    print("| tokens | shards | index.json | opening it | first order of rows | peak memory of a rank |")
    print("|---|---|---|---|---|---|")
    for tokens in (50e9, 1e12):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "benchmarks.scaling", "open", "--tokens", str(tokens), "--folder", folder]
            print(subprocess.run(words, check=True, capture_output=True, text=True).stdout, end="", flush=True)


def open_index(tokens: float, folder: Path) -> None:
    """In a process of its own, for its memory."""
    import numpy as np

    from data_prep.rows import Rows, rows_digest
    from pipeline.data import RowStream

    per_shard = SHARD // (ROW_LENGTH * 2 + 40)
    total = int(tokens / ROW_LENGTH / 0.99)
    shards = -(-total // per_shard)
    entries = []
    for number in range(shards):
        count = min(per_shard, total - number * per_shard)
        entries.append(
            {
                "column_encodings": ["ndarray:uint32", "ndarray:uint16"],
                "column_names": ["lengths", "tokens"],
                "column_sizes": [None, None],
                "compression": None,
                "format": "mds",
                "hashes": ["xxh64"],
                "raw_data": {
                    "basename": f"shard.{number:05d}.mds",
                    "bytes": count * (ROW_LENGTH * 2 + 40),
                    "hashes": {"xxh64": f"{number * 2654435761 % (1 << 64):016x}"},
                },
                "samples": count,
                "size_limit": SHARD,
                "version": 2,
                "zip_data": None,
            }
        )
    whole = {"version": 2, "shards": entries}
    file = folder / "index.json"
    file.write_text(json.dumps(whole, sort_keys=True))
    manifest = {
        "software": "0", "row_length": ROW_LENGTH, "packing": "synthetic", "split": None, "sources": [], "seed": 0,
        "tokenizer": {"name": "t", "digest": "0", "vocabulary": 50368, "special": {}, "roles": {}},
        "counts": {"documents": total, "pieces": total, "tokens": int(tokens), "rows": total, "dropped": {}},
        "rows_digest": rows_digest(whole),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    del entries, whole
    Rows(_tiny(folder / "warm"))  # imports
    begin = time.perf_counter()
    opened = Rows(folder)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    RowStream(np.asarray(opened.shard_rows), 42)[0]
    order = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"| {tokens / 1e9:,.0f} B | {shards:,} | {os.path.getsize(file) / 1e6:.1f} MB | {seconds:.1f} s | {order:.1f} s | {peak / 1e9:.1f} GB |"
    )


def _tiny(folder: Path) -> Path:
    """An index without shards."""
    from data_prep.rows import rows_digest

    folder.mkdir()
    (folder / "index.json").write_text('{"version": 2, "shards": []}')
    manifest = {
        "software": "0", "row_length": 8, "packing": "none", "split": None, "sources": [], "seed": 0,
        "tokenizer": {"name": "t", "digest": "0", "vocabulary": 5, "special": {}, "roles": {}},
        "counts": {"documents": 0, "pieces": 0, "tokens": 0, "rows": 0, "dropped": {}},
        "rows_digest": rows_digest({"shards": []}),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def store() -> None:
    from data_prep.rows import Remote, Shard, ShardFiles
    from tests.services import object_store

    with tempfile.TemporaryDirectory() as folder, object_store(Path(folder)) as server:
        os.environ.update(server.environment)
        client = server.client()
        client.create_bucket(Bucket="b")
        data = os.urandom(SHARD)
        for number in range(8):
            client.put_object(Bucket="b", Key=f"shard.{number}.mds", Body=data)
        cache = Path(folder) / "cache" / "rows"
        cache.mkdir(parents=True)
        files = ShardFiles(Remote("s3://b"), cache)
        files.ensure(Shard("shard.0.mds", SHARD, None))
        begin = time.perf_counter()
        for number in range(1, 8):
            files.ensure(Shard(f"shard.{number}.mds", SHARD, None))
        seconds = time.perf_counter() - begin
        print(
            f"one process, one connection, a server on the same {os.cpu_count()} cores: {7 * SHARD / seconds / 1e6:.0f} MB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["calculation", "index", "store", "open"], default="calculation")
    parser.add_argument("--tokens", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "index":
        index()
    elif arguments.what == "store":
        store()
    elif arguments.what == "open":
        open_index(arguments.tokens, arguments.folder)
    else:
        throughput()
        cache()
        checkpoints()


if __name__ == "__main__":
    main()
