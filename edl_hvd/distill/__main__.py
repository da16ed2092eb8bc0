"""One teacher's process; ``edl-hvd teach`` starts one for each device."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TextIO

from edl_hvd.distill.serving import Serving
from edl_hvd.distill.teacher import Teacher, load
from edl_hvd.distill.teachers import token_of
from edl_hvd.errors import EdlHvdError
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.platforms import Addresses
from edl_hvd.notices.watch import open_watch
from edl_hvd.settings import Settings, TeacherSettings, platform_addresses
from edl_hvd.tls import server_context


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m edl_hvd.distill", description=__doc__)
    parser.add_argument("build", help="FILE.py:FUNCTION or MODULE:FUNCTION that returns the model")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--token-file", default="")
    parser.add_argument("--tls-cert", default="")
    parser.add_argument("--tls-key", default="")
    return parser.parse_args()


def main() -> int:
    """Load the model, listen, say so in a line, and answer until SIGTERM or a notice of the platform."""
    arguments = _arguments()
    try:
        settings = TeacherSettings.from_environment()
        given = arguments.token_file
        token = token_of("" if given else settings.token, given or settings.token_file)
        if arguments.threads:
            import torch

            torch.set_num_threads(arguments.threads)
        teacher = Teacher.of(load(arguments.build)(), arguments.device)
        context = server_context(arguments.tls_cert, arguments.tls_key) if arguments.tls_cert else None
        serving = Serving(teacher, arguments.max_batch, arguments.listen, arguments.port, token, context)
        signal.signal(signal.SIGTERM, lambda number, frame: serving.leave())
        signal.signal(signal.SIGINT, lambda number, frame: serving.leave())

        def notice(heard: Notice) -> None:
            if heard.deadline_s is not None:
                _tell(sys.stdout, f"leaving: {heard.words}")
                serving.leave()

        watch = open_watch(Settings.from_environment().notices, notice, Addresses(**platform_addresses()))
        _tell(sys.stdout, f"{teacher.name} answers at {arguments.listen}:{serving.port}")
        serving.serve()
        if watch is not None:
            watch.stop()
    except EdlHvdError as error:
        _tell(sys.stderr, f"edl-hvd teach: {error}")
        return 1
    return 0


def _tell(where: TextIO, line: str) -> None:
    """Write a line at once: ``print`` writes its end by itself, and the processes of other devices write there, too."""
    where.write(f"{line}\n")
    where.flush()


if __name__ == "__main__":
    sys.exit(main())
