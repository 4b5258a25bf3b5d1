"""Which runs are frozen: the features of a training step, the rules that exclude combinations, and how runs are drawn.

The draw is a greedy covering of all pairs of choices that can stand together, filled up at random. It uses numbers of
its own (`stream`), so it is the same with every version of Python and NumPy.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

RUNS = 340
GIVEN_AT_LEAST = 0.65  # of the runs take gradients that were made here, not by a model
# Pairs that a run must bring more than another, for it takes longer: a model, and block scaling op by op.
_OF_MODEL, _OF_BLOCKS = 3, 8
_MASK = 2**64 - 1

FEATURES: dict[str, tuple[str, ...]] = {
    "policy": ("fp32", "bf16", "fp16", "fp8"),
    "keep": ("none", "some"),  # a pattern of keep_fp32 that fits one leaf
    "optimizer": (
        "adamw", "sgd", "lion", "lamb", "adafactor", "multi_transform", "masked", "clip", "schedule", "multisteps",
        "fused_adamw", "fused_lion", "fused_sgd", "int8", "fused_int8", "fused_e4m3", "bf16_moments", "ema",
    ),
    "masters": ("own", "masters", "split16", "split8", "frozen"),
    "scale": (
        "none", "static", "dynamic", "megatron", "torch", "deepspeed", "deepspeed_fused", "apex", "apex_amp", "mmcv",
        "shared",
    ),
    "recipe": ("none", "delayed", "current", "block"),
    "skip": ("nonfinite", "skip_if", "off"),
    "accumulate": ("1", "4"),
    "tree": ("dict", "boxes", "nnx", "tuple", "empty"),
    "way": ("update", "apply", "linen", "nnx", "flax_nnx", "scaler"),
    "events": ("none", "inf", "nan", "pair"),
}  # fmt: skip
PRESETS = FEATURES["scale"][3:10]
IN_EIGHT_BITS = ("int8", "fused_int8", "fused_e4m3")


class Case(NamedTuple):
    """One choice of each feature."""

    policy: str
    keep: str
    optimizer: str
    masters: str
    scale: str
    recipe: str
    skip: str
    accumulate: str
    tree: str
    way: str
    events: str

    @property
    def takes_given_gradients(self) -> bool:
        """Whether its gradients were made here; else they come from a model, through `value_and_grad`."""
        return self.recipe == "none" and self.accumulate == "1" and self.tree != "nnx"


def name_of(index: int, case: Case) -> str:
    """The id of a run, such as `017-bf16-adamw-split16-...`: its number, and whatever is not the usual choice."""
    usual = {"none", "1", "nonfinite"}
    return "-".join([f"{index:03}", *(x for x in case if x not in usual), *(["x4"] if case.accumulate == "4" else [])])


# Each rule of the documentation that excludes a combination: its reason, and choices that exclude each other when each
# of the features has one of those that it names. `!` before the first choice: any but these.
_TINY = "8-bit moments need a leaf of 4096 elements; models are tiny"
RULES: tuple[tuple[str, dict[str, str]], ...] = (
    ("16-bit params have masters", {"policy": "bf16 fp16", "masters": "own"}),
    ("float32 params are their own masters", {"policy": "fp32 fp8", "masters": "masters"}),
    ("remainder_bits: the params are bfloat16", {"masters": "split16 split8", "policy": "!bf16"}),
    ("split masters are written by apply_gradients", {"masters": "split16 split8", "way": "update flax_nnx scaler"}),
    ("the policy fp8 needs layers in fp8", {"policy": "fp8", "recipe": "none"}),
    ("fp8 layers compute in 16 bits here", {"policy": "fp32", "recipe": "!none"}),
    ("a dynamic scale skips by overflow", {"skip": "off", "scale": "!none static"}),
    ("under a shared scale the gradients are checked", {"skip": "off", "scale": "shared"}),
    ("without skips, elements are held one by one: that will change", {"skip": "off", "events": "!none"}),
    ("an average is kept in taken steps only: that will change", {"optimizer": "ema", "events": "!none"}),
    ("an average is kept in taken steps only: that will change", {"optimizer": "ema", "skip": "skip_if"}),
    ("a shared scale has its own apply_gradients", {"scale": "shared", "way": "!apply"}),
    ("two optimizers share a scale for plain trees", {"scale": "shared", "tree": "nnx boxes"}),
    ("the second optimizer of a shared scale has no layers in fp8", {"scale": "shared", "recipe": "!none"}),
    ("GradScaler has no skip_if, and always skips", {"way": "scaler", "skip": "!nonfinite"}),
    ("a GradScaler that is not enabled skips nothing", {"way": "scaler", "scale": "none", "events": "!none"}),
    ("GradScaler has no part for the scales of fp8", {"way": "scaler", "recipe": "!none"}),
    ("accumulate is an argument of value_and_grad", {"way": "scaler", "accumulate": "4"}),
    ("flax's optimizers of nnx train modules of nnx", {"tree": "nnx", "way": "!nnx flax_nnx"}),
    ("flax's optimizers of nnx train modules of nnx", {"tree": "!nnx", "way": "nnx flax_nnx"}),
    ("layers in fp8 are linen's or nnx's", {"recipe": "!none", "tree": "tuple empty"}),
    (_TINY, {"optimizer": " ".join(IN_EIGHT_BITS), "recipe": "!none"}),
    (_TINY, {"optimizer": " ".join(IN_EIGHT_BITS), "accumulate": "4"}),
    (_TINY, {"optimizer": " ".join(IN_EIGHT_BITS), "tree": "nnx"}),
)  # fmt: skip


_RULES = [
    (reason, [(feature, words.removeprefix("!").split(), words.startswith("!")) for feature, words in excluded.items()])
    for reason, excluded in RULES
]
_RULES_OF = {feature: [rule for rule in _RULES if any(feature == part[0] for part in rule[1])] for feature in FEATURES}


def why_not(choices: dict[str, str], feature: str | None = None) -> str | None:
    """The rule, of those for `feature` or of all, that excludes these choices; None: it must work."""
    for reason, excluded in _RULES if feature is None else _RULES_OF[feature]:
        if all(name in choices and (choices[name] in words) != any_but for name, words, any_but in excluded):
            return reason
    return None


def stream(seed: int) -> Iterator[int]:
    """Numbers of 64 bits that look random: splitmix64."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & _MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        yield z ^ (z >> 31)


@functools.cache
def pairs_of(case: Case) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of (feature, choice) of a case."""
    return frozenset(itertools.combinations(zip(FEATURES, case, strict=True), 2))


@functools.cache
def all_pairs() -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of choices that can stand together in a run."""
    numbers = stream(1)
    two = itertools.combinations([(feature, choice) for feature, all_of in FEATURES.items() for choice in all_of], 2)
    return frozenset((a, b) for a, b in two if a[0] != b[0] and _filled(dict([a, b]), numbers) is not None)


@functools.cache
def draw() -> list[Case]:
    """The runs: first a covering of all pairs, then random ones."""
    numbers, missing = stream(2026), set(all_pairs())
    cases: list[Case] = []
    while missing and len(cases) < RUNS:
        wanted = sorted(missing)
        tries = [_filled(dict(wanted[next(numbers) % len(wanted)]), numbers) for _ in range(24)]
        best = max(
            (case for case in tries if case is not None),
            key=lambda case: (
                len(pairs_of(case) & missing)
                - _OF_BLOCKS * (case.recipe == "block")
                - _OF_MODEL * (not case.takes_given_gradients)
            ),
        )
        cases.append(best)
        missing -= pairs_of(best)
    given = sum(case.takes_given_gradients for case in cases)
    while len(cases) < RUNS:
        case = _filled({}, numbers)
        assert case is not None
        enough_given = given >= GIVEN_AT_LEAST * len(cases)
        if case in cases or case.recipe == "block" or not (case.takes_given_gradients or enough_given):
            continue
        given += case.takes_given_gradients
        cases.append(case)
    return cases


def _filled(choices: dict[str, str], numbers: Iterator[int], new: str | None = None) -> Case | None:
    """A valid case with these choices and others at random; None if there is none. All but `new` are valid."""
    if why_not(choices, new) is not None:
        return None
    # Features of which rules speak most come first, so that the search seldom has to turn back.
    left = [f for f in ("tree", "way", "recipe", "policy", "masters", "scale", "skip", *FEATURES) if f not in choices]
    if not left:
        return Case(**choices)
    options = list(FEATURES[left[0]])
    while options:
        choice = options.pop(next(numbers) % len(options))
        case = _filled(choices | {left[0]: choice}, numbers, left[0])
        if case is not None:
            return case
    return None


def dyadic(seed: int, shape: tuple[int, ...], *, largest: int = 15) -> np.ndarray:
    """float32 of few bits: k / 4 to k / 32 with k up to `largest` and any sign, one of eight 0.0."""
    numbers = itertools.islice(stream(seed), int(np.prod(shape)))
    values = [
        0.0 if n % 8 == 0 else (1 - 2 * (n >> 8 & 1)) * (1 + (n >> 16) % largest) / (1 << 2 + (n >> 32) % 4)
        for n in numbers
    ]
    return np.array(values, np.float32).reshape(shape)


def full(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float32 between -1 and 1 with all their bits, none smaller than 1/16."""
    numbers = itertools.islice(stream(seed), int(np.prod(shape)))
    values = [(1 - 2 * (n & 1)) * (2**-4 + (n >> 40) * 2.0**-24 * (1 - 2**-4)) for n in numbers]
    return np.array(values, np.float32).reshape(shape)
