"""``from_trace`` and its source, a file."""

from __future__ import annotations

from collections.abc import Callable

from discovery_scenes import _FileScene, in_order


class TraceScene(_FileScene):
    """A trace whose time all but stands still, from its middle on."""

    script = "from_trace"

    @property
    def words(self) -> list[str]:
        return [self.file.name, "--slots", "3", "--skip", "10min", "--speed", "1e-9"]

    @property
    def variables(self) -> dict[str, str]:
        return {
            "EDL_HVD_DISCOVERY_TRACE": self.file.name,
            "EDL_HVD_DISCOVERY_SLOTS": "3",
            "EDL_HVD_DISCOVERY_SKIP": "10min",
            "EDL_HVD_DISCOVERY_SPEED": "1e-9",
        }

    def show(self, count: int) -> list[str]:
        coming = "".join(f"500000,add,node-{number}\n" for number in reversed(range(count)))
        self.write(f"0,add,gone\n{coming}# late\n600000,remove,gone\n601000,add,late\n")
        return in_order((f"node-{number}", 3) for number in range(count))

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            **super().doubts,
            "half written": lambda: self.write("0,add,node-0\n1000,ad"),
            "no newline": lambda: self.write("0,add,node-0\n1000,add,node-1"),
            "out of order": lambda: self.write("1000,add,node-0\n500,add,node-1\n"),
            "removes a stranger": lambda: self.write("0,add,node-0\n500,remove,node-1\n"),
        }
