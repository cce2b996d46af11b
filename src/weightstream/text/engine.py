"""A language model that streams, with its tokenizer: prompts become tokens, and tokens become an answer."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightstream.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from weightstream.runtime.streamer.streamer import Streamer
    from weightstream.text.sampling import Sampling
    from weightstream.text.stream import Answer, Piece

Messages = Sequence[Mapping[str, Any]]
Inputs = dict[str, "torch.Tensor"]


logger = logging.getLogger("weightstream")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_NUM_TRIED = 4  # tokens of a trial: drafts are verified from the second on


class PromptError(ConfigError):
    """A prompt that the model cannot take: without tokens, too long, or refused by the chat template."""


class TextModel:
    """A model and its tokenizer, which is loaded first: a bad prompt is an error before a long load."""

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        transformers = importlib.import_module("transformers")
        from weightstream.adapters.hf.hub import config_and_class, find, refused_as_checkpoint, weights_named
        from weightstream.store.checkpoint import Checkpoint
        from weightstream.store.header import IS_LFS_POINTER, is_lfs_pointer

        source = find(name, trust_remote_code)
        Checkpoint.open(
            source.path, weights_named(source.path, None)
        )  # headers only, so that an error of the weights is not reported as one of the tokenizer
        with refused_as_checkpoint(name, "load"):
            self._config = config_and_class(source, None, trust_remote_code)[0].get_text_config()
        folder = source.folder
        if source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file():
            folder = source.adapter
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # of any class, depending on the files
            if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
                raise CheckpointError(
                    f"{name} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there; copy the tokenizer's "
                    "files from where the model comes from"
                ) from error
            pointers = [f for f in _TOKENIZER_FILES if (folder / f).is_file() and is_lfs_pointer(folder / f)]
            if pointers:
                raise CheckpointError(f"{name}: {pointers[0]} {IS_LFS_POINTER}") from error
            raise CheckpointError(f"{name}: its tokenizer cannot be loaded: {error}") from error
        self.name = name

    # -- prompts -------------------------------------------------------------------------------------------------------

    @property
    def num_positions(self) -> int | None:
        """Tokens of prompt and answer together, at most; None: the config does not say."""
        num: int | None = getattr(self._config, "max_position_embeddings", None)
        return num

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, text: str) -> Inputs:
        """The model's inputs for a text to continue, each of shape (1, tokens)."""
        return self._encoded(text, is_template=False)

    def encode_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> Inputs:
        """The model's inputs for a conversation, whose next message is the answer."""
        if not self.has_chat_template:
            raise PromptError(f"{self.name} has no chat template")
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **options
            )
        except Exception as error:  # a template is a program
            raise PromptError(f"{self.name}: its chat template refuses these messages: {error}") from error
        return self._encoded(text, is_template=True)

    def encode_ids(self, ids: Sequence[int]) -> Inputs:
        """The model's inputs for tokens."""
        import torch

        if not ids:
            raise PromptError("the prompt has no tokens")
        self._check_ids(ids)
        tokens = torch.tensor([ids])
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise `PromptError` for a token that the model has no embedding of: a GPU that looks it up stops working."""
        num = getattr(self._config, "vocab_size", None)
        if num is None or self._config.is_encoder_decoder:  # the encoder may have tokens of its own
            return
        if unknown := [token for token in (min(ids), max(ids)) if not 0 <= token < num]:
            raise PromptError(f"the model's tokens are from 0 to {num - 1}, and the prompt has {unknown[0]}")

    def _encoded(self, text: str, *, is_template: bool) -> Inputs:
        encoded = self.tokenizer(text, add_special_tokens=not is_template, return_tensors="pt")
        if not encoded["input_ids"].numel():
            raise PromptError(f"the prompt {text[:80]!r} has no tokens")
        self._check_ids(encoded["input_ids"][0].tolist())
        return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}

    def limited(self, inputs: Inputs, sampling: Sampling) -> Sampling:
        """The sampling, for an answer that ends where the model's positions end: some have no embedding of later ones.

        Raises `PromptError` if the prompt takes them all.
        """
        num, positions = inputs["input_ids"].shape[1], self.num_positions
        if positions is None or self._config.is_encoder_decoder or num + sampling.max_new_tokens <= positions:
            return sampling
        if num >= positions:
            raise PromptError(
                f"the prompt has {num} tokens, and the model {positions} positions: there is no room left"
            )
        logger.warning(
            "max_new_tokens is %d: the prompt has %d of the model's %d positions", positions - num, num, positions
        )
        return dataclasses.replace(sampling, max_new_tokens=positions - num)

    # -- answers -------------------------------------------------------------------------------------------------------

    def load(self, **options: Any) -> None:
        """Load the model; `options` go to `from_pretrained`."""
        import transformers

        from weightstream.api.offload import from_pretrained

        self.model = from_pretrained(self.name, **options)
        self.streamer: Streamer = self.model.weightstream
        transformers.logging.set_verbosity_error()  # no advice on generation settings, which the user did not choose
        if not self.model.can_generate():
            raise UnsupportedError(f"{self.name}: {type(self.model).__name__} does not generate text")

    def generate(
        self,
        inputs: Inputs,
        sampling: Sampling,
        *,
        on_piece: Callable[[Piece], object] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        cache_length: int | None = None,
        **options: Any,
    ) -> Answer:
        """The answer of `weightstream.generate` to a prompt.

        Args:
            inputs: what one of the `encode` methods returned.
            sampling: how tokens are chosen, and where the answer ends.
            on_piece: called with pieces of the text, as soon as they are certain.
            is_cancelled: asked after each token; true ends the answer.
            cache_length: positions of a static KV cache. transformers keeps the longest one so far, and a longer one
                adds in another order: with one length for all, an answer does not depend on earlier ones.
            options: more arguments of `weightstream.generate`, such as `speculate` and `bits`.
        """
        from weightstream.adapters.generation.generation import generate
        from weightstream.text.sampling import seeded
        from weightstream.text.stream import Answer, LogprobRecorder

        config, device = self.model.generation_config, self.streamer.device
        num_top = sampling.top_logprobs
        recorder = None if num_top is None else LogprobRecorder(self.tokenizer, num_top)
        answer = Answer(self.tokenizer, sampling.stop, recorder, on_piece, is_cancelled)
        options |= self.placed(inputs) | sampling.options(config) | {"stopping_criteria": [answer]}
        if recorder is not None:
            options["logits_processor"] = [recorder]
        if cache_length is not None and hasattr(config, "max_cache_len"):
            options["max_cache_len"] = cache_length
        with seeded(sampling.seed, device):
            generate(self.model, **options, on_decoding=answer.set_decoding)
        ends = config.eos_token_id
        answer.end(ends if isinstance(ends, list) else [ends])
        return answer

    def exact_drafts(self, cache_length: int) -> dict[str, Any]:
        """The options with which `generate` has the bits of one token at a time, whatever is drafted.

        A few tokens are generated to find out whether passes of several tokens can have these bits; else nothing is
        drafted. They also warm up: the first answer would wait for kernels to load and for the order of the weights.
        """
        from weightstream.text.sampling import Sampling

        inputs, sampling = self.encode_ids([0] * _NUM_TRIED), Sampling(max_new_tokens=_NUM_TRIED, temperature=0.0)
        mode = getattr(getattr(self.streamer, "drafting", None), "mode", "off")
        exact = {"bits": "token"}
        try:
            always: dict[str, Any] = {} if mode == "off" else {**exact, "speculate": "lookup"}
            self.generate(inputs, sampling, cache_length=cache_length, **always)
        except UnsupportedError as error:
            logger.info("no tokens are drafted: %s", error)
            return {"speculate": "off"}
        return {} if mode == "off" else exact

    def placed(self, inputs: Inputs) -> Inputs:
        """Inputs on the device that computes."""
        return {name: value.to(self.streamer.device) for name, value in inputs.items()}
