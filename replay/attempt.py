"""One attempt at a block or window: its record says how it ended, whatever ended it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay import rundir
from replay.progress import Event, Tell
from replay.records import Block, Window
from replay.servers import DYING_S, Servers
from replay.workers import Ended


def make_room(folder: Path, what: str, tell: Tell) -> int:
    """Set aside what an interrupted attempt at a block or window left in ``folder``. ``what``: its name, for the user.
    Returns how many attempts are kept."""
    kept = rundir.set_aside(folder)
    if kept is not None:
        tell(Event(text=f"an interrupted attempt is kept as {kept.name}; {what} is measured again"))
    return rundir.attempts(folder)


@contextmanager
def attempt(record: Block | Window, file: Path, servers: Servers) -> Iterator[None]:
    """Measure inside. Rewrites ``file`` when it has ended: finished, or why not.

    Raises Ended, with the log's cause, if the server is gone, also where clients could not tell.
    """
    name = record.backend
    try:
        yield
        if servers.died(name) is not None:
            raise Ended("server gone", f"the server is gone at the end of {file.parent.name}: continue with --resume")
    except KeyboardInterrupt:
        record.cut_short = "interrupted"
        rundir.write_json(file, record)
        raise
    except Ended as ended:
        why = servers.died(name, within_s=DYING_S if ended.why == "server gone" else 0.0)
        record.cut_short = ended.why if why is None else "server gone"
        rundir.write_json(file, record)
        if why is not None:
            raise Ended("server gone", f"{ended}\n{name}: {why}") from None
        raise
    record.finished = True
    rundir.write_json(file, record)
