"""What to compile, and how often to compile anew."""

from __future__ import annotations

import dataclasses
import enum

from omniloom.errors import ConfigError, suggest


class Granularity(enum.StrEnum):
    """NONE: eager. REGIONAL: the repeated blocks, each kind once. FULL: the whole forward as one region."""

    NONE = "none"
    REGIONAL = "regional"
    FULL = "full"

    @classmethod
    def of(cls, value: Granularity | str) -> Granularity:
        """Return the granularity named ``value``. Raises ``ConfigError``."""
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(cls)
            raise ConfigError(
                f"unknown compile granularity {value!r}{suggest(str(value), cls)} (allowed: {allowed})"
            ) from None


@dataclasses.dataclass(frozen=True)
class CompilePolicy:
    """How a model is compiled.

    granularity: what is compiled. budget: how often a kind of block may be compiled anew, beyond warm-up, before calls
    with inputs of new shapes run eagerly; it lies below dynamo's own limit of 8, past which dynamo stops in silence.
    strict: nothing to compile is an error, and so is a hook inside of what is compiled.
    """

    granularity: Granularity | str = Granularity.REGIONAL
    budget: int = 4
    strict: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "granularity", Granularity.of(self.granularity))
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 0:
            raise ConfigError(f"the compile budget is a whole number from 0, not {self.budget!r}")
