"""Damage files of every format that users give, read them as stages do, and say what went wrong.

`python damaged_files.py FOLDER SEED NUM_CASES FORMAT...`: each case's number and format stand in
FOLDER/case before it is read, so that the caller knows which one ended the process.
Prints a line for each error that is not ours or does not name the file, and the number of cases.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What a damaged file may ask for must fail here, and not take the machine's memory.
_MAX_BYTES = 24 << 30
_JUNK = (None, True, -1, 0, 1.5, 10**30, "", "x", [], {}, [1], {"a": 5}, [[]], float("nan"), "\x00")
Reader = Callable[[Path, str], None]
Damage = Callable[[bytes, random.Random], bytes]

_NUMBERS = (b"\xff" * 4, b"\x00" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80")


def damage(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes, cut some out, put some in."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        place = chance.randrange(len(data)) if data else 0
        match chance.randrange(7):
            case 0 if data:
                data[place] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[place] = chance.randrange(256)
            case 2:
                data[place:place] = chance.randbytes(chance.choice((1, 4, 64)))
            case 3:
                del data[place : place + chance.choice((1, 8, 200))]
            case 4:
                del data[place:]
            case 5:
                number = chance.choice(_NUMBERS)
                data[place : place + len(number)] = number
            case _:
                other = chance.randrange(len(data)) if data else 0
                data[place:place] = data[other : other + chance.choice((1, 16, 300))]
    return bytes(data)


def damage_json(content: bytes, chance: random.Random) -> bytes:
    """Put junk in the place of a value, or damage the bytes."""
    if chance.random() < 0.4:
        return damage(content, chance)
    record = json.loads(content)
    for _ in range(chance.choice((1, 1, 2))):
        if not isinstance(record, dict | list) or chance.random() < 0.05:
            return json.dumps(chance.choice(_JUNK)).encode()
        holder: Any = record
        while True:
            if not holder:
                break
            key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not isinstance(holder[key], dict | list) or chance.random() < 0.4:
                if chance.random() < 0.3:
                    del holder[key]
                else:
                    holder[key] = chance.choice(_JUNK)
                break
            holder = holder[key]
    if chance.random() < 0.02:
        return b'{"a": ' * 100_000
    return json.dumps(record).encode()


ROWS = [
    {"source": f"word {n} é中", "target": "x" * (n % 7), "more": [n, n + 1], "weight": n / 3}
    for n in range(40)
]


def write_rows(path: Path) -> None:
    """Write the rows in the format that the path's name says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix in (".gz", ".zst"):
        write_rows(path.with_suffix(""))
        codec = "gzip" if path.suffix == ".gz" else "zstd"
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), codec) as stream:
            stream.write(path.with_suffix("").read_bytes())
        return
    table = pa.Table.from_pylist(ROWS)
    way = path.stem
    if path.suffix == ".parquet":
        compression = "none" if way == "plain" else way
        pq.write_table(table, path, compression=compression, row_group_size=16)
    elif path.suffix == ".arrow":
        compression = {"lz4": "lz4", "zstd": "zstd"}.get(way.split("-")[-1])
        new = pa.ipc.new_file if way.startswith("file") else pa.ipc.new_stream
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as out:
            out.write_table(table.slice(0, 20), max_chunksize=10)
            out.write_table(table.slice(20).combine_chunks())
    elif path.suffix in (".csv", ".tsv"):
        delimiter = "," if path.suffix == ".csv" else "\t"
        lines = [["source", "target"], *([row["source"], row["target"]] for row in ROWS)]
        path.write_text(
            "".join(f'"{delimiter}"'.join(["", *line, ""])[2:-2] + "\n" for line in lines)
        )
    elif way == "array":
        path.write_text(json.dumps(ROWS, indent=2))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def lies(contents: list[bytes]) -> Damage:
    """Return what puts other content behind a file's name: another format, encoding or junk."""

    def lie(content: bytes, chance: random.Random) -> bytes:
        other = chance.choice(contents)
        match chance.randrange(6):
            case 0:
                return content.decode("utf-8", "replace").encode(
                    chance.choice(("utf-16", "cp500")), "replace"
                )
            case 1:
                return chance.choice((b"[", b'{"a": ', b'[{"a": ')) * chance.choice((9, 100_000))
            case 2:
                return chance.randbytes(chance.choice((0, 1, 8, 5000)))
            case 3:
                return chance.choice((gzip.compress, zlib.compress))(other)
            case 4:
                return damage(other, chance)
        return other

    return lie


def read_rows(folder: Path, name: str) -> None:
    """Read a data file as preprocessing does."""
    from redco_flow.stages.data.row_files import read_file

    for _ in read_file(folder / name):
        pass


def read_split(folder: Path, name: str) -> None:
    """Read a block of a dataset in the making."""
    from redco_flow.stages.artifacts.arrow_split import read_batches

    for _ in read_batches(folder / name, ["source", "target"]):
        pass


def write_model(folder: Path) -> None:
    """Write a tiny model in two files with an index, and alone in one."""
    import jax

    from redco_flow.models.find import find_model

    t5 = find_model("t5")
    from redco_flow.models.hub.pretrained import save_pretrained
    from redco_flow.models.hub.tensors import save_params

    config = t5.Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    params = t5.init_params(config, jax.random.key(0))
    save_pretrained(folder, t5, config, params)
    (folder / "two").mkdir()
    save_pretrained(folder / "two", t5, config, params)
    save_params(folder / "two", t5.tensor_layouts(config), params, max_file_bytes=3000)


class ModelReader:
    """Read a model's directory: its tensors into the shapes of the model that was written."""

    def __init__(self) -> None:
        from redco_flow.models.find import find_model

        t5 = find_model("t5")

        config = t5.Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        self.layouts, self.shapes = t5.tensor_layouts(config), t5.abstract_params(config)

    def __call__(self, folder: Path, name: str) -> None:
        from redco_flow.models.hub.tensors import load_params

        load_params((folder / name).parent, self.layouts, self.shapes)


def read_config(folder: Path, name: str) -> None:
    """Read a model's configuration, and its tensors' names."""
    from redco_flow.models.hub.pretrained import model_type, read_model

    model_type((folder / name).parent)
    read_model((folder / name).parent)


def write_configs(folder: Path) -> None:
    """Write a `config.json` of several families."""
    from redco_flow.models.find import FAMILIES, find_config

    for family in FAMILIES:
        (folder / family).mkdir()
        record = find_config(family)().to_hugging_face()
        if family == "llama":
            record["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
        (folder / family / "config.json").write_text(json.dumps(record))
        ends = {"eos_token_id": [1, 2], "forced_bos_token_id": 1, "decoder_start_token_id": 0}
        (folder / family / "generation_config.json").write_text(json.dumps(ends))


def write_tokenizers(folder: Path) -> None:
    """Write a trained tokenizer of each type, and one that knows whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer

    for kind in ("bpe", "unigram"):
        texts = [row["source"] + " some words to learn from" for row in ROWS]
        save_tokenizer(train_tokenizer(iter(texts), 300, kind), folder / kind)
    vocab = {word: place for place, word in enumerate(["[UNK]", "[SEP]", "word", "##s", "5"])}
    words = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "words").mkdir()
    words.save(str(folder / "words" / "tokenizer.json"))
    (folder / "words" / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')


def use_tokenizer(folder: Path, name: str) -> None:
    """Load a tokenizer and do with it all that stages do."""
    from redco_flow.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.load((folder / name).parent)
    _ = (tokenizer.vocab_size, tokenizer.digest, tokenizer.prefix_ids)
    ids = tokenizer.encode_batch(["word 5 é中", "", "x" * 50])
    tokenizer.decode_batch(ids)


def write_vocabularies(folder: Path) -> None:
    """Write tokenizers without a tokenizer.json, as the first models were published."""
    (folder / "gpt2").mkdir()
    vocab = {token: place for place, token in enumerate(["<end>", *"wordx5", "wo", "rd"])}
    (folder / "gpt2" / "vocab.json").write_text(json.dumps(vocab))
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\nw o\nr d\n")
    values = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "unk_token": "<end>"}
    (folder / "gpt2" / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "bert").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "##s", "x", "5"]
    (folder / "bert" / "vocab.txt").write_text("\n".join(words))
    (folder / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (folder / "bert" / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')


def use_vocabulary(folder: Path, name: str) -> None:
    """Load a published tokenizer as preprocessing does, and use what was saved."""
    from redco_flow.engine.files import UnreadableFile
    from redco_flow.stages.artifacts.tokenizer import save_pretrained_tokenizer

    source = (folder / name).parent
    with tempfile.TemporaryDirectory() as saved:
        try:
            save_pretrained_tokenizer(str(source), Path(saved))
            use_tokenizer(Path(saved), "tokenizer.json")
        except UnreadableFile as error:  # of what was saved: names the folder that it is in
            raise UnreadableFile(str(error).replace(saved, str(source))) from error
        except ValueError as error:
            if type(error) is ValueError:
                raise UnreadableFile(str(error)) from error
            raise


Reader = Callable[[Path, str], None]
Damage = Callable[[bytes, random.Random], bytes]


def files_of(folder: Path, kind: str) -> tuple[list[str], Reader, Damage]:
    """Write whole files of one format; return their names, how to read and how to damage them."""
    by_rows = {
        "jsonl": ["rows.jsonl"],
        "json": ["rows.json"],
        "csv": ["rows.csv"],
        "tsv": ["rows.tsv"],
        "parquet": ["plain.parquet", "snappy.parquet", "zstd.parquet"],
        "arrow": ["stream.arrow", "file.arrow", "stream-lz4.arrow", "file-zstd.arrow"],
        "split": ["stream.arrow"],
        "array": ["array.json"],
        "compressed": ["r.jsonl.gz", "r.jsonl.zst", "r.csv.gz", "r.tsv.zst", "array.json.gz"],
    }
    by_rows["lying"] = [
        name for kind, names in by_rows.items() if kind != "split" for name in names
    ]
    if kind in by_rows:
        names = by_rows[kind]
        for name in names:
            write_rows(folder / name)
        if kind == "lying":
            return names, read_rows, lies([(folder / name).read_bytes() for name in names])
        return names, read_split if kind == "split" else read_rows, damage
    if kind in ("safetensors", "index"):
        write_model(folder)
        shards = [path.name for path in sorted((folder / "two").glob("*.safetensors"))]
        if kind == "index":
            return ["two/model.safetensors.index.json"], ModelReader(), damage_json
        return ["model.safetensors", *(f"two/{name}" for name in shards)], ModelReader(), damage
    if kind == "config":
        write_configs(folder)
        files = ("config.json", "config.json", "generation_config.json")
        names = [f"{path.name}/{file}" for path in folder.iterdir() for file in files]
        return names, read_config, damage_json
    if kind == "vocabulary":
        write_vocabularies(folder)
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("*/*"))]
        return names, use_vocabulary, damage
    assert kind == "tokenizer"
    write_tokenizers(folder)
    names = ["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]
    return (
        [f"{one}/{name}" for one in ("bpe", "unigram", "words") for name in names],
        use_tokenizer,
        damage_json,
    )


def problem_of(error: BaseException, path: Path) -> str | None:
    """Say what is wrong with an error itself, or None."""
    from redco_flow.engine.files import UnreadableFile
    from redco_flow.errors import RedcoFlowError

    ours: tuple[type[BaseException], ...] = (RedcoFlowError, UnreadableFile)
    if "redco_flow.models.hub.tensors" in sys.modules:
        ours += (sys.modules["redco_flow.models.hub.tensors"].CheckpointMismatch,)
    if not isinstance(error, ours):
        return f"not ours: {traceback.format_exception(error)[-6:]}"
    named = (path.name in str(error)) or (str(path.parent) in str(error))
    return None if named else f"does not name the file: {error}"


def _peak_memory_mib() -> int:
    """Read this program's own peak: `ru_maxrss` includes that of the process it was forked from."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(line.split()[1]) >> 10


def main() -> None:
    """Read damaged files of each format in turn."""
    root, seed, num_cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    num_refused = 0
    for kind in sys.argv[4:]:
        folder = root / kind
        folder.mkdir()
        names, read, damaged = files_of(folder, kind)
        whole = {name: (folder / name).read_bytes() for name in names}
        for name in names:
            read(folder, name)
        for case in range(num_cases):
            chance = random.Random(f"{seed} {kind} {case}")
            name = names[case % len(names)]
            (root / "case").write_text(f"{kind} {case}")
            (folder / name).write_bytes(damaged(whole[name], chance))
            try:
                read(folder, name)
            except BaseException as error:
                num_refused += 1
                if problem := problem_of(error, folder / name):
                    print(f"{kind} {case}: {problem}", flush=True)
            (folder / name).write_bytes(whole[name])
        shutil.rmtree(folder)
    print(f"MiB {_peak_memory_mib()}")
    print(f"refused {num_refused}")


if __name__ == "__main__":
    main()
