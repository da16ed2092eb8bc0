"""Which teachers a script wants, as it says in one place."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edl_hvd.distill.asks import Asks, PendingAnswer, ask_model
from edl_hvd.distill.finding import DEFAULT_PORT, read_teachers
from edl_hvd.distill.outputs import LOGITS, Outputs
from edl_hvd.distill.teacher import Teacher
from edl_hvd.errors import StateError, UsageError
from edl_hvd.open_inference import is_inference_source, read_models
from edl_hvd.proof import check_token
from edl_hvd.settings import TeacherSettings
from edl_hvd.teacher_models import teacher_models
from edl_hvd.tls import client_context
from edl_hvd.values import Interval

_MEGABYTE = 1 << 20


class Teachers:
    """The teachers that answer for a student; original here.

    Every rank makes one with the same arguments; it starts nothing, and is not collective. All workers of a job use
    teachers with the same fingerprint. Given to ``State``, it keeps the fingerprint in checkpoints: a job that resumes
    then uses the same or none.
    Without a source, and without ``EDL_HVD_TEACHERS``, the model of ``local`` computes in this process.

    Args:
        source: Where the teachers are, as ``edlrun --discover`` writes it: "file:teachers.txt", "ec2:tag=role=teacher".
            A host's slots are its teachers. Or models on servers of the Open Inference Protocol, separated by commas:
            "oip:http://host:8000/resnet". Left out, it is ``EDL_HVD_TEACHERS``, which ``edlrun --teachers`` sets.
        token: Secret that teachers and students share; left out, ``EDL_HVD_TEACHERS_TOKEN``.
        token_file: File that holds the secret, read at every call; left out, ``EDL_HVD_TEACHERS_TOKEN_FILE``.
        port: Port of the first teacher of each host.
        outputs: What to send back: "logits" for all that the model returns, "float16" for the same in half the bytes,
            "top_k=10,temperature=2" for the likeliest classes at the temperature of the loss (left out, it is 1).
        patience: Longest time without any answer, such as "10min", before the loader raises an error.
        local: Function without arguments that returns the model, for a script that runs without a service. A module
            computes on the device of its parameters, so ``build_model().to(edl_hvd.device())`` is one on the worker's
            GPU.
        window_mb: Memory in megabytes for micro-batches that were read and not consumed, at least 1.
        exact: Whether each micro-batch is computed by itself, in one shape, so that its bits do not depend on who
            answers.
        fingerprint: Fingerprint that a teacher must have; left out, that of the first one.
        tls_ca: File with the certificates of the CAs that teachers are verified by, or "system" for those of this
            machine; teachers are called by TLS then. Left out, ``EDL_HVD_TEACHERS_TLS_CA``.

    Attributes:
        fingerprint: Fingerprint of the teachers whose answers are used; empty before the first one.

    Raises:
        UsageError: An argument is out of range, or there is neither a source nor ``local``.
    """

    def __init__(
        self,
        source: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        port: int = DEFAULT_PORT,
        outputs: str = LOGITS,
        patience: str | float = "10min",
        local: Callable[[], Any] | None = None,
        window_mb: float = 256,
        exact: bool = False,
        fingerprint: str = "",
        tls_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = TeacherSettings.from_environment()
        self.source = source or settings.source
        self.token = token_of(
            token if token is not None else settings.token,
            str(token_file) if token_file is not None else settings.token_file,
        )
        if self.source:
            _check_source(self.source, exact)
        elif local is None:
            raise UsageError(
                "there are no teachers: no source was given, EDL_HVD_TEACHERS is not set, and there is no local=; "
                "start teachers with 'edl-hvd teach' and the job with 'edlrun --teachers SOURCE', or give "
                "Teachers(local=build)"
            )
        authority = os.fspath(tls_ca) if tls_ca is not None else settings.tls_ca
        self.context = client_context(authority) if authority else None
        if local is not None and not callable(local):
            raise UsageError(f"local is a {type(local).__name__}; expected a function that returns the model")
        if not 0 < port <= 65535:
            raise UsageError(f"port={port!r}; expected 1 to 65535")
        if not window_mb >= 1:
            raise UsageError(f"window_mb={window_mb!r}; expected at least 1")
        span = Interval.parse(patience)
        if span.unit != "seconds":
            raise UsageError(f"patience={patience!r} is no time; expected seconds, or a text such as '10min'")
        self.port, self.outputs, self.local = port, outputs, local
        self.reduction = Outputs.parse(outputs)
        self.patience_s = span.count
        self.limit_bytes = int(window_mb * _MEGABYTE)
        self.exact, self.fingerprint = exact, fingerprint
        self._given_fingerprint = fingerprint
        self._asks: Asks | None = None
        self._model: Teacher | None = None

    def ask(self, send: Any) -> PendingAnswer:
        """Ask for the answer to an input that is no part of a data set, such as sequences that the student has made.

        Any rank; not collective. Blocks while ``window_mb`` of inputs wait, else it returns at once::

            asked = [teachers.ask(tokens) for tokens in sequences]
            for tokens, answer in zip(sequences, asked):
                loss = distill.distillation_loss(model(tokens), answer.result(), temperature=2.0)

        Such an input is not a function of a place. So its answer is not used again after a rollback, and where it
        depends on the world, so do the weights, also with ``exact``. An input of another shape per sample waits for the
        answers to those before, and begins the conversations anew: pad inputs, or sort them by length.

        Args:
            send: Tensor, or dict of tensors, whose first dimension is the batch. It is copied.

        Returns:
            A :class:`~edl_hvd.distill.asks.PendingAnswer`, whose ``result()`` is the answer.

        Raises:
            UsageError: ``send`` is something else, or several teachers have failed on an earlier input.
            NoTeacherError: There is no room, and there was no answer for as long as ``patience``.
        """
        if not self.source:
            if self._model is None:
                self._model = self.local_model()
            return ask_model(self._model, self, send)
        if self._asks is None:
            self._asks = Asks(self)
            weakref.finalize(self, self._asks.close)
        return self._asks.ask(send)

    def local_model(self) -> Teacher:
        """The model of ``local``. Called by the package; blocks while it is built; not collective.

        Returns:
            A teacher in this process.

        Raises:
            UsageError: Its weights are not those that were asked for, or learned from before.
        """
        assert self.local is not None
        model = Teacher.of(self.local())
        if self.fingerprint and model.fingerprint != self.fingerprint:
            raise UsageError(
                f"the model of local= has fingerprint {model.fingerprint or 'none'}, and the training learns from "
                f"{self.fingerprint}; build the same weights, or leave `teachers` out of State(…)"
            )
        self.met(model.fingerprint)
        return model

    def met(self, fingerprint: str) -> None:
        """Take note of the fingerprint of the teachers whose answers are used. Called by the package.

        Args:
            fingerprint: Digest of the weights; empty where nothing is known of them.
        """
        self.fingerprint = self.fingerprint or fingerprint
        if self.source and not self._given_fingerprint:
            teacher_models.meet(self.source, fingerprint)

    def wanted(self) -> str:
        """The fingerprint that a teacher must have from now on; empty for that of the first one. Called by the package.

        It is that which the workers of the job have agreed on, if they have.
        """
        if self.source and not self._given_fingerprint:
            self.fingerprint = teacher_models.agreed(self.source) or self.fingerprint
        return self.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint of the teachers whose answers were used, which ``State(teachers=teachers, …)`` keeps."""
        return {"fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use only teachers like those whose answers were used before.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            StateError: The script asks for teachers with another fingerprint.
        """
        saved = str(state["fingerprint"])
        if saved and self._given_fingerprint and saved != self._given_fingerprint:
            raise StateError(
                f"the saved training has learned from teachers with fingerprint {saved}, and Teachers(fingerprint=…) "
                f"names {self._given_fingerprint}; go on with those teachers, or leave `teachers` out of State(…)"
            )
        self.fingerprint = saved or self._given_fingerprint or self.fingerprint

    def close(self) -> None:
        """End the connections of :meth:`ask`; those of loaders are theirs. Any rank; not collective."""
        if self._asks is not None:
            self._asks.close()
            self._asks = None


def _check_source(source: str, exact: bool) -> None:
    """Check where teachers are."""
    if not is_inference_source(source):
        read_teachers(source).source.close()
        return
    read_models(source)
    if exact:
        raise UsageError(
            f"exact=True and the servers of {source!r}: such a server may compute several requests together, so the "
            "bits of an answer depend on the others; expected teachers of 'edl-hvd teach', or exact=False"
        )


def token_of(token: str, token_file: str) -> Callable[[], str]:
    """What gives the token whenever it is needed; an empty one if there is none.

    Args:
        token: Token itself; it beats the file.
        token_file: File that is read at every call.

    Raises:
        UsageError: The token may not serve as one, or the file cannot be read.
    """
    if token or not token_file:
        check_token(token)
        return lambda: token

    def read() -> str:
        try:
            return check_token(Path(token_file).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the teachers' token from {token_file!r}: {error}") from error

    read()
    return read
