"""The engine process's entry: `python -m stanchion.cli.worker ADDRESS SETTINGS_JSON PARENT`."""

from __future__ import annotations

import gc
import sys

import msgspec
import torch

from stanchion.cli.settings import model_folder
from stanchion.core.config import Config
from stanchion.core.errors import ServeError
from stanchion.core.messages import Hello
from stanchion.engine.assemble import assemble, pages_that_fit
from stanchion.engine.loop import Engine
from stanchion.engine.scheduler import Limits
from stanchion.engine.worker import serve
from stanchion.model.hashed import HashModel
from stanchion.model.text import Model


def build(config: Config) -> tuple[Engine, Hello]:
    """Load the model and put the engine together. Raise ConfigError or WeightsError."""
    model, name, revision, eos_ids = load_model(config)
    engine_settings = config.engine
    limits = Limits(
        chunk_tokens=engine_settings.chunk_tokens,
        running_max=engine_settings.running_max,
        waiting_max=engine_settings.waiting_max,
        draft_tokens=engine_settings.draft_tokens if model.schema.draft else 0,
    )
    pages = pages_that_fit(model.schema, config.kv.memory_gib)
    failpoints = frozenset(filter(None, config.lab.failpoints.split(",")))
    engine = assemble(
        model, limits, pages, name, revision, eos_ids, failpoints, config.lab.record_drafts,
        engine_settings.context_max,
    )  # fmt: skip
    hello = Hello(
        model=name,
        revision=revision,
        schema=model.schema.digest(),
        page_tokens=model.schema.page_tokens,
        pages=pages - 1,
        context_max=engine.served.context_max,
        vocabulary=model.vocabulary,
        draft_tokens=limits.draft_tokens,
        eos_ids=eos_ids,
        failpoints=tuple(sorted(failpoints)),
    )
    return engine, hello


def load_model(config: Config) -> tuple[Model, str, str, tuple[int, ...]]:
    """The model, its name, its revision, and the tokens that end an answer."""
    drafts = config.engine.draft_tokens > 0
    if config.model.path == "hashed":
        model = HashModel(config.kv.page_tokens, drafts, config.model.hashed_top_k or None)
        return model, "hashed", "1", model.eos_ids
    from stanchion.model.load import load_glm  # the hash model needs none of it

    folder = model_folder(config.model.path)
    return load_glm(
        folder,
        config.kv.page_tokens,
        dtype=config.model.dtype,
        index_dtype=config.model.index_dtype,
        draft=drafts,
        deterministic=config.engine.deterministic,
        progress=_progress,
    )


def _progress(done: int, total: int) -> None:
    """One line that grows on a terminal, a line a tenth elsewhere."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rloading weights {100 * done // total:3d} %", end=end, file=sys.stderr)
    elif done == total:
        print(f"loaded {total} tensors", file=sys.stderr)


def main(argv: list[str]) -> int:
    address, text, parent = argv
    config = msgspec.json.decode(text, type=Config)
    torch.set_num_threads(config.engine.threads)
    try:
        with torch.inference_mode():
            engine, hello = build(config)
            gc.collect()
            gc.freeze()  # what was loaded stays: collections need not walk it again
            serve(engine, hello, address, int(parent))
    except ServeError as error:
        print(f"stanchion: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
