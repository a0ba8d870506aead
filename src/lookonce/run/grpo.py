"""The section `grpo` of the run file: learning from the rewards of answers that the model draws itself (GRPO).

Source: DeepSeekMath (https://arxiv.org/abs/2402.03300). The defaults are those of DAPO
(https://arxiv.org/abs/2503.14476): a higher upper clip, the mean over tokens, no KL, and questions without differences
replaced.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lookonce.run.sections import FUNCTION, METRICS, BatchSection
from lookonce.settings import Same, Section

_OF_METRICS = "exact_match exact_match_lower token_f1 token_recall label_f1 label_set_match point_inside".split()
REWARDS = {name: METRICS[name] for name in _OF_METRICS} | {
    "count": "distance of counts",
    "point_distance": "distance of points",
    "format": "form of the answer",
}
"""The rewards that need no function of the user's own, by their keys, as they are named in texts."""
REFUSED_BATCH = ("mode", "loss", "order", "balance")
"""Keys of `batch` that must have their defaults."""


def _check_reward(name: str) -> str:
    if name not in REWARDS and not FUNCTION.fullmatch(name):
        raise ValueError(f"a reward is one of {', '.join(REWARDS)}, or a function of yours, as module:function")
    return name


RewardName = Annotated[str, AfterValidator(_check_reward)]
Weight = Annotated[float, Field(ge=-1000, le=1000, strict=True)]
Rewards = Annotated[
    dict[RewardName, Weight],
    Field(min_length=1, max_length=20),
    BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value),
]
"""Rewards with their weights; one name is the only reward."""


class GrpoSection(Section):
    """Reinforcement learning: from the rewards of answers that the model draws itself. Has an effect with
    `train.objective: grpo`."""

    samples: Same[Annotated[int, Field(ge=2, le=1024)]] = 8
    """How many answers to each question are drawn. What an answer is worth is compared with the others to its
    question."""
    max_new_tokens: Same[Annotated[int, Field(ge=1, le=100_000)]] = 32
    """Longest answer in tokens; longer ones are cut off."""
    cut: Same[Literal["masked", "punished", "kept"]] = "masked"
    """What happens to answers that were cut off. `masked`: nothing is learned from them, but their rewards count for
    the mean of their question. `punished`: they get the lowest reward of all. `kept`: they
    are as all others."""
    temperature: Same[Annotated[float, Field(ge=0.01, le=100)]] = 1.0
    """The logits are divided by it, where answers are drawn and in the loss."""
    top_p: Same[Annotated[float, Field(gt=0, le=1)]] = 1.0
    """Each token is drawn from the most probable ones that together have this probability. The loss does not know of
    it: it has the probabilities among all tokens, as TRL's."""
    reward: Same[Rewards] = {"exact_match": 1.0}
    """What an answer is worth: a reward, or a mapping of rewards to weights, which are summed. `exact_match`,
    `exact_match_lower`, `token_f1`, `token_recall`, `label_f1`, `label_set_match`, `count`, `point_inside`,
    `point_distance`, `format`; or a function of yours in a module that Python can import, as `module:function`. Each is
    from 0 to 1, that of a function any number, and weights may be negative."""
    kl: Same[Annotated[float, Field(ge=0, le=1000)]] = 0.0
    """Weight of the distance to the model without the adapter, or with that of `train.start_from`: an estimate of the
    KL divergence in each token (k3, http://joschu.net/blog/kl-approx.html)."""
    clip: Same[Annotated[list[Annotated[float, Field(ge=0, le=100)]], Field(min_length=2, max_length=2)]] = [0.2, 0.28]
    """How far the probability of a token may be below and above that with which it was drawn, as a share of it; beyond,
    nothing is learned from it. Has an effect with several `iterations`."""
    iterations: Same[Annotated[int, Field(ge=1, le=100)]] = 1
    """Optimizer steps with the same answers."""
    scale: Same[Literal["std", "none"]] = "std"
    """Whether the rewards of a question, less their mean, are divided by their standard deviation."""
    loss: Same[Literal["token", "sequence"]] = "token"
    """`token`: mean over all tokens of a step's answers, TRL's `dapo`. `sequence`: mean over its answers, each with the
    mean of its tokens, TRL's `grpo`."""
    filter: Same[bool] = True
    """Replace questions whose answers have equal rewards, from which nothing is learned, by others, until a step is
    full or has asked 100 times as many. Otherwise they count in the mean, as in TRL."""


def refused(batch: BatchSection, dropout: float, fsdp: bool) -> str | None:
    """Why a run cannot learn from rewards with other settings of it; None if it can."""
    defaults = BatchSection()
    for key in REFUSED_BATCH:
        if (value := getattr(batch, key)) != (default := getattr(defaults, key)):
            hint = "; grpo.loss says how the loss is a mean" if key == "loss" else ""
            return f"needs batch.{key}: {'null' if default is None else default} (got {value}){hint}"
    if dropout:
        return f"needs lora.dropout: 0 (got {dropout}), or other weights draw the answers than are trained"
    if fsdp:
        return "needs train.fsdp: false: no GPU has all weights to draw answers with"
    return None
