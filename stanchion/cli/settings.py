"""From argv, environment and files to one Config, read once."""

from __future__ import annotations

from pathlib import Path

from stanchion.core.config import Config, load
from stanchion.core.errors import ConfigError

SWITCH_S = 0.0005  # threads that move KV want the interpreter once a copy: they must not wait long


def read_config(file: str | None, sets: list[str]) -> Config:
    """Defaults, then the TOML file, then every name=value of `sets`. Raise ConfigError."""
    text = ""
    if file is not None:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the settings file {file}: {error}") from None
    return load(Config(), text, sets)


def output_folder(folder: Path) -> None:
    """Makes it, if it is not there. Raise ConfigError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be a folder: {error.strerror}") from None


def model_folder(path: str) -> Path:
    """Where a model's files lie; 'tiny' is the embedded checkpoint."""
    if path == "tiny":
        return Path(__file__).parent.parent / "model" / "tiny"
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {path!r} is no model: it must be 'tiny', 'hashed' or a folder with "
            "config.json, *.safetensors and tokenizer.json"
        )
    return folder
