"""What every part is given: the device and its timer, sizes, how long it may take, and where its records go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from report import Record, unmeasured
from sizes import Sizes
from timing import Timer

from moecomm.errors import TransportUnavailable

__all__ = ["Context"]


@dataclass
class Context:
    """One part's run.

    Attributes:
        part: its name.
        timer: of the device.
        sizes: of all operands.
        seed: of all random inputs, fresh for every run.
        case_seconds: for the repetitions of one measurement.
        deadline: of `time.monotonic`; no case begins behind it.
        tell: called with each record as it comes.
    """

    part: str
    timer: Timer
    sizes: Sizes
    seed: int
    case_seconds: float
    deadline: float
    tell: Callable[[Record], None]
    records: list[Record] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.timer.device

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.tell(record)

    def attempt(self, what: str, shape: str, case: Callable[[], Any]) -> bool:
        """Runs a case that adds its own records; whatever stops it becomes a record, and the next case can run.

        Returns:
            Whether it came to its end.
        """
        if time.monotonic() > self.deadline:
            # A check that was left out must not look like one that found nothing.
            is_error = self.part == "checks"
            self.add(unmeasured(self.part, what, shape, "not measured: the part's time is over", is_error=is_error))
            return False
        try:
            case()
            self.timer.synchronize()
        except torch.cuda.OutOfMemoryError:
            # Without the traceback, which holds the tensors.
            message = "not measured: not enough memory on the device"
        except TransportUnavailable as error:
            message = f"not measured: {error}"
        except Exception as error:  # noqa: BLE001  one broken kernel must not hide the figures of the others
            message = f"{type(error).__name__}: {error}"
        else:
            return True
        is_error = not message.startswith("not measured")
        self.add(unmeasured(self.part, what, shape, message, is_error=is_error))
        if self.timer.is_gpu and not is_error:
            torch.cuda.empty_cache()
        return False
