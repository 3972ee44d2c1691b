"""One exception per cause. The message names the thing, the numbers, and what to do next; the CLI prints it as one `error:` line."""


class BaechiError(Exception):
    """Base of every error a user can cause or mend; anything else that escapes is a defect of this project."""


class FileError(BaechiError):
    """A file cannot be read or written, or its content is not the JSON it should be."""


class GraphError(BaechiError):
    """An operator graph breaks a rule: a cycle, an unknown node, a duplicate id, a bad cost."""


class ClusterError(BaechiError):
    """A device or link description breaks a rule."""


class PlanError(BaechiError):
    """A plan breaks a rule: an op without a device, a split colocation group, too little memory."""


class MismatchError(BaechiError):
    """A profile or plan belongs to another graph; names the first op that differs."""


class ProfileError(BaechiError):
    """A profile breaks a rule or lacks a cost."""


class MeasurementError(BaechiError):
    """A measured step breaks a rule: ops that overlap on a device, a time that is none."""


class OptionError(BaechiError):
    """An option has a value nothing can be done with; lists the valid ones."""


class InfeasibleError(BaechiError):
    """No valid plan: `status` is "infeasible" where that is proven, "unknown" where the search found none.

    `conflict` names ops and colocation groups that provably do not fit together, where such were found; `minimal` says that any of
    them left out lets the others fit.
    """

    def __init__(self, message: str, status: str = "infeasible", conflict: tuple[str, ...] = (), *, minimal: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.conflict = conflict
        self.minimal = minimal

    def to_json(self) -> dict[str, object]:
        """What `--json` prints."""
        found = {"conflict": list(self.conflict), "minimal": self.minimal} if self.conflict else {}
        return {"status": self.status, "error": str(self), **found}


class SolverError(BaechiError):
    """A solver failed or stopped without an answer."""


class SolverTimeoutError(SolverError):
    """A solver was not done by the time limit."""


class PolicyError(BaechiError):
    """A learned policy can't be used: its file is damaged, or it was trained on other features."""


class CaptureError(BaechiError):
    """A training step could not be turned into an operator graph."""


class MissingBackendError(BaechiError):
    """A package or device that the request needs is not there; says how to get it or what to use instead."""


class ExecutionError(BaechiError):
    """A placed step failed while it ran: an op raised, or a device did not answer in time."""


class CheckpointError(BaechiError):
    """A checkpoint is damaged, or of another training."""


class ParityError(BaechiError):
    """The placed step does not compute what the unplaced step computes."""


class ShardError(BaechiError):
    """A sharding problem breaks a rule, or its tables would not fit the memory they may take."""
