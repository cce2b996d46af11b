"""Explanations, by their names, of weights that only the checkpoint or only its model has.

Knows only names: transformers reports unexpected keys of the files and missing keys of the model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence

_LAYER = re.compile(r"(.*?\.)?(\d+)\.")  # the prefix of the first number, and the number
# parts of names that peft uses, whole or as prefixes
_ADAPTERS = re.compile(r"(?:^|\.)(?:(?:base_layer|modules_to_save)(?:\.|$)|(?:lora|ia3|vera|oft|hada|lokr)_)")


def layers(names: Iterable[str], unexpected: Iterable[str]) -> str | None:
    """A line about the numbered layers of the files that a model with weights of these names lacks; None: there are
    none."""
    numbered = {(match[1] or "", int(match[2])) for name in names if (match := _LAYER.match(name))}
    lists = {prefix for prefix, _ in numbered}
    found: dict[str, set[int]] = {}
    for name in unexpected:
        if match := _LAYER.match(name):
            end, number = match[1] or "", int(match[2])
            # a file may have the names of the base model, without its prefix
            prefix = next((prefix for prefix in sorted(lists) if prefix == end or prefix.endswith(f".{end}")), None)
            if prefix is not None and (prefix, number) not in numbered:
                found.setdefault(prefix, set()).add(number)
    ranges = [
        f"{prefix}{min(numbers)}" + f" to {prefix}{max(numbers)}" * (len(numbers) > 1)
        for prefix, numbers in sorted(found.items())
    ]
    return f"layers that the config does not have are left out: {', '.join(ranges)}" if ranges else None


def remedy(
    missing: Sequence[str],
    unexpected: Sequence[str],
    base_prefix: str,
    *,
    buffers: Container[str] = (),
    is_mapped: bool = False,
) -> str:
    """Advice about weights that a model misses while the files have `unexpected` ones.

    `buffers` are names of the model's buffers, which cannot be weights of a head. `is_mapped`: a key_mapping was given,
    and the names are the mapped ones.
    """
    if any(map(_ADAPTERS.search, unexpected)):
        return (
            "the file is of a model with an adapter of peft in it: load that with peft, merge_and_unload() and "
            "save_pretrained() it, or load the model that the adapter is for, then model.load_adapter(folder)"
        )
    if not is_mapped and (mapping := _prefix(missing, unexpected)) is not None:
        return f"their names differ by a prefix: pass key_mapping={mapping!r}"
    random = "allow_missing=True to give them random values"
    weights = [name for name in missing if name not in buffers]
    if not weights and not unexpected:
        return "they are buffers that the code adds: pass allow_missing=True to load it all the same"
    if weights and base_prefix and not any(name.startswith(f"{base_prefix}.") for name in weights):
        return f"pass model_class=transformers.AutoModel for the model without its head, or {random}, as to train them"
    if unexpected and is_mapped:
        return (
            f"by key_mapping the files have {len(unexpected)} weights that it does not have, such as {unexpected[0]}: "
            f"mend key_mapping, else pass {random}"
        )
    if unexpected:
        return (
            f"the files have {len(unexpected)} weights that it does not have, such as {unexpected[0]}: pass "
            f"key_mapping= if these are the same under other names, else {random}"
        )
    return f"pass {random}"


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> dict[str, str] | None:
    """The `key_mapping` that gives most of the missing weights their names in the file, if one prefix does."""
    wanted, in_files = set(missing), set(unexpected)
    more = (name.removesuffix(end) for name in unexpected for end in _ends(name) if end in wanted)
    less = (name.removesuffix(end) for name in missing for end in _ends(name) if end in in_files)
    candidates = [*((f"^{re.escape(prefix)}", "") for prefix in more), *(("^", prefix) for prefix in less)]
    for pattern, prefix in dict.fromkeys(candidates):
        named = {re.sub(pattern, prefix, name, count=1) for name in unexpected}
        if 2 * len(wanted & named) > len(wanted):
            return {pattern: prefix}
    return None


def _ends(name: str) -> Iterable[str]:
    """The name without its first part, without its first two parts, and so on."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
