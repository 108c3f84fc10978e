"""`Tokenizer`: a Hugging Face tokenizer without transformers, which would import torch (550 MB) into torch-free processes.

The runner tokenizes prompts and rollouts decode; both read the same files, so their ids agree. The interface is a subset of that of
transformers tokenizers, so that rollouts accept either.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from rl_core.api.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
MODEL_FILES = ("config.json", "generation_config.json")
"""Files of the model folder that a rollout needs besides weights; the runner sends them when it registers."""
HEAD_CHARACTERS = 16
"""A text with more characters than this per wanted token is tokenized from its head only, because a token takes 400 bytes of memory."""


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the configuration and tokenizer files of a model folder that exist, by name."""
    names = [*TOKENIZER_FILES, *MODEL_FILES]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def head_of(text: str, tokenizer: Callable[..., Mapping[str, Any]], max_tokens: int) -> str:
    """Return `text`, or a head of it that has more than twice `max_tokens` tokens: all tokens of a huge text may not fit into memory."""
    size = HEAD_CHARACTERS * max_tokens
    while size < len(text):
        if len(tokenizer(text[:size])["input_ids"]) > 2 * max_tokens:
            return text[:size]
        size *= 4
    return text


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, Mapping) else entry


class Tokenizer:
    """Encodes, decodes and renders chat templates."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_id: int,
        pad_token_id: int,
        chat_template: str | None,
        specials: Mapping[str, str],
    ) -> None:
        """Wrap `backend`; `specials` are the named special tokens a template may use (bos_token, eos_token, ...)."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.chat_template = chat_template
        self._specials = dict(specials)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer folder. Raises ConfigError when it is missing, damaged, or without an eos token."""
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"model.path must hold tokenizer.json, got a folder without it: {folder}; save the tokenizer with save_pretrained"
            )
        return cls.from_files(read_files(folder), origin=str(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, origin: str = "hello") -> "Tokenizer":
        """Build from file contents by name; `origin` names their source in errors."""
        try:
            backend = Backend.from_buffer(files["tokenizer.json"])
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            configs = [json.loads(files[name]) for name in ("generation_config.json", "config.json") if name in files]
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"tokenizer of {origin} must be readable, got {type(error).__name__}: {error}; save it again"
            ) from error
        except Exception as error:
            raise ConfigError(f"tokenizer.json of {origin} must be valid, got: {error}; save it again") from error
        if not all(isinstance(settings, dict) for settings in (config, *configs)):
            raise ConfigError(
                f"the config files of {origin} must hold JSON objects, got another value in one; save them again"
            )
        specials = {
            key: text for key, value in config.items() if key.endswith("_token") and (text := _token_text(value))
        }
        eos = cls._special_id(backend, specials.get("eos_token"), "eos_token_id", configs)
        if eos is None:
            raise ConfigError(
                f"tokenizer of {origin} must name an eos_token that is in its vocabulary, got {specials.get('eos_token')!r}; "
                "set eos_token in tokenizer_config.json, generation cannot end without it"
            )
        pad = cls._special_id(backend, specials.get("pad_token"), "pad_token_id", configs)
        template = cls._template(files, config, origin)
        return cls(
            backend,
            eos_token_id=eos,
            pad_token_id=eos if pad is None else pad,
            chat_template=template,
            specials=specials,
        )

    @staticmethod
    def _template(files: Mapping[str, bytes], config: Mapping[str, Any], origin: str) -> str | None:
        """Return the chat template: the file, else the one of the config; of several by name the default one."""
        if "chat_template.jinja" in files:
            try:
                return files["chat_template.jinja"].decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"chat_template.jinja of {origin} must be UTF-8, got {error}; save it again"
                ) from error
        template = config.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        return template if isinstance(template, str) else None

    @staticmethod
    def _special_id(backend: Backend, text: str | None, key: str, configs: Sequence[Mapping[str, Any]]) -> int | None:
        if text is not None and (token_id := backend.token_to_id(text)) is not None:
            return int(token_id)
        for config in configs:
            value = config.get(key)
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, int):
                return value
        return None

    def __len__(self) -> int:
        """Return the vocabulary size, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Return {"input_ids": ids} of `text`."""
        return {"input_ids": list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)}

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids without special tokens and the character at which each begins."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        return list(encoded.ids), [start for start, _ in encoded.offsets]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of `ids` (any iterable of integers, tensors included)."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the rendered conversation. Raises ConfigError when there is no template or it fails.

        `template` None = that of the tokenizer; `variables` are further variables of the template, such as `tools`.
        """
        from rl_core.data.chat_template import render  # jinja2 is needed for message lists only

        source = template or self.chat_template
        if source is None:
            raise ConfigError(
                "message lists need a chat template, got a tokenizer without one; set data.chatTemplate, or use text (in data, without data.chat)"
            )
        return render(
            source,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self._specials, **(variables or {})},
        )
