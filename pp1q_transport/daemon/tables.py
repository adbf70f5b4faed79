"""Taking a TOML table apart strictly: every key is known, of its type and in its range, or one line says what is wrong.

Between `tomllib` and `config`. Knows no key by name and opens no file.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final, NoReturn, cast

from ..errors import ConfigError, shown

TEXT_CHARS: Final = 256
INTEGER_MOST: Final = (1 << 63) - 1  # of TOML itself


class Table:
    """One table of a configuration. Each getter takes its key out; `done` refuses what is left. All raise `ConfigError`, one
    line that names file, table and key."""

    def __init__(self, source: str, name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {name} must be a table, not {shown(value)}")
        self.where = f"{source}: {name}"
        self._left: dict[str, object] = dict(value)
        self._known: set[str] = set()  # every key that was asked for

    def fail(self, key: str, allowed: str, found: object) -> NoReturn:
        """Refuses `key`: it must be `allowed`, not what was `found`."""
        raise ConfigError(f"{self.where} {key} must be {allowed}, not {shown(found)}")

    def has(self, key: str) -> bool:
        """Whether `key` is given and was not taken yet."""
        self._known.add(key)
        return key in self._left

    def take(self, key: str) -> object:
        """The raw value of a key that must be there."""
        if not self.has(key):
            raise ConfigError(f"{self.where} {key} is missing")
        return self._left.pop(key)

    def done(self) -> None:
        """Refuses every key that nobody took."""
        for key in self._left:
            near = get_close_matches(key, sorted(self._known), 1)
            raise ConfigError(f"{self.where} has no key {shown(key)}" + (f": did you mean `{near[0]}`?" if near else ""))

    def forbid(self, key: str, why: str) -> None:
        """Refuses `key`, which is known but not wanted here."""
        if key in self._left:
            raise ConfigError(f"{self.where} {key} is not allowed: {why}")

    def integer(self, key: str, bounds: tuple[int, int] | None, default: int | None = None) -> int:
        """An integer within `bounds` (both included; None: judged elsewhere); a boolean is none. No default: it must be there."""
        if default is not None and not self.has(key):
            return default
        value = self.take(key)
        low, high = bounds or (-INTEGER_MOST - 1, INTEGER_MOST)
        if type(value) is not int or not low <= value <= high:
            self.fail(key, "an integer" + (f" in {low}..{high}" if bounds is not None else ""), value)
        return value

    def seconds(self, key: str, default: float, low: float, high: float, zero: bool = False) -> float:
        """A finite number of seconds in `low`..`high`, or 0 where that means something."""
        if not self.has(key):
            return default
        value = self.take(key)
        allowed = f"{'0 or ' if zero else ''}a number of seconds in {low:g}..{high:g}"
        if type(value) not in (int, float):
            self.fail(key, allowed, value)
        number = cast("float", value)  # compared as it is: a large integer has no float
        if not low <= number <= high and not (zero and number == 0):
            self.fail(key, allowed, value)
        return float(number)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        if not self.has(key):
            return default
        value = self.take(key)
        if not isinstance(value, bool):
            self.fail(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A printable text of 1..256 characters. No default: it must be there."""
        if default is not None and not self.has(key):
            return default
        value = self.take(key)
        if not isinstance(value, str) or not 1 <= len(value) <= TEXT_CHARS or not value.isprintable():
            self.fail(key, f"a text of 1..{TEXT_CHARS} printable characters", value)
        return value

    def maybe(self, key: str) -> str | None:
        """As `text`, None when it is not given."""
        return self.text(key) if self.has(key) else None

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """One of `choices`. No default: it must be there."""
        if default is not None and not self.has(key):
            return default
        value = self.take(key)
        if not isinstance(value, str) or value not in choices:
            self.fail(key, " or ".join(f'"{item}"' for item in choices), value)
        return value

    def items(self, key: str, most: int, what: str) -> list[object] | None:
        """A list of 1..`most` different entries (`what` names them in an error); None when it is not given."""
        if not self.has(key):
            return None
        value = self.take(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            self.fail(key, f"a list of 1..{most} {what}", value)
        if len({shown(item) for item in value}) != len(value):
            self.fail(key, f"a list of {what}, none twice", value)
        return value
