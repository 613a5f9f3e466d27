"""Classify what Slurm prints: transient refusals, submit limits, pending reasons that never clear.

Texts of errors are those of `src/common/slurm_errno.c`, reasons those of job_reason_string() in
`src/common/slurm_protocol_defs.c`, both of Slurm 22.05; sbatch adds some of its own and of libc.
"""

from __future__ import annotations

import re

_TRANSIENT = {
    "Unable to contact slurm controller": "SLURMCTLD_COMMUNICATIONS_CONNECTION_ERROR and others",
    "Socket timed out on send/recv operation": "SLURM_PROTOCOL_SOCKET_IMPL_TIMEOUT",
    "Zero Bytes were transmitted": "SLURM_PROTOCOL_SOCKET_ZERO_BYTES_SENT",
    "Unexpected message received": "SLURM_UNEXPECTED_MSG_ERROR",
    "Communication connection failure": "SLURM_COMMUNICATIONS_CONNECTION_ERROR",
    "Communication shutdown failure": "SLURM_COMMUNICATIONS_SHUTDOWN_ERROR",
    "Message send failure": "SLURM_COMMUNICATIONS_SEND_ERROR",
    "Message receive failure": "SLURM_COMMUNICATIONS_RECEIVE_ERROR",
    "Protocol authentication error": "SLURM_PROTOCOL_AUTHENTICATION_ERROR; munge restarts",
    "Slurm backup controller in standby mode": "ESLURM_IN_STANDBY_MODE",
    "Controller is in standby mode": "ESLURM_IN_STANDBY_USE_BACKUP",
    "I/O error writing script/environment to file": "ESLURM_WRITING_TO_FILE",
    "Unable to create job record, try again": "ESLURM_ERROR_ON_DESC_TO_RECORD_COPY",
    "Unable to connect to database": "ESLURM_DB_CONNECTION",
    "temporarily unable to accept job": "sbatch.c: MaxJobCount of the cluster",
    "Resource temporarily unavailable": "EAGAIN",
    "Connection refused": "ECONNREFUSED",
    "Connection reset by peer": "ECONNRESET",
    "timed out": "ETIMEDOUT",
}
"""Texts of transient refusals, and the source of each."""

_LAST_ERROR = re.compile(r".*(?:Batch job submission failed|allocate resources): ", re.DOTALL)
_SUBMIT_LIMIT = re.compile(r"\b(?:QOS|Assoc)(?:Max|Grp)SubmitJobs?\w*")

_NEVER_STARTS = [
    (
        re.compile(r"PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJobLimit"),
        "its time is above the limit: lower resources.walltime_minutes",
    ),
    (
        re.compile(r"(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|MaxMemPerLimit"),
        "one job may not have so much: lower the stage's resources",
    ),
    (
        re.compile(r"QOSMin\w+"),
        "the QOS requires more of a job: raise the stage's resources or change slurm.qos",
    ),
    (
        re.compile(r"InvalidAccount|AccountNotAllowed"),
        "the account is not valid there: change slurm.account",
    ),
    (re.compile(r"InvalidQOS|QOSNotAllowed"), "the QOS is not valid there: change slurm.qos"),
    (re.compile(r"BadConstraints"), "no node has this: change slurm.constraint or resources"),
    (re.compile(r"DeadLine"), "it cannot end before its --deadline: change slurm.options"),
    (re.compile(r"ReservationDeleted"), "the reservation is gone: change slurm.reservation"),
    (re.compile(r"DependencyNeverSatisfied"), "a job that it depends on did not complete"),
]


def is_transient(said: str) -> bool:
    """Whether a command failed for a reason that passes by itself.

    Args:
        said: its error output; of sbatch, what counts is the last error, after its own retries.
    """
    last = _LAST_ERROR.sub("", said).lower()
    return any(text.lower() in last for text in _TRANSIENT)


def find_submit_limit(said: str) -> str:
    """Return the limit of submitted jobs that sbatch names, as "QOSMaxSubmitJobPerUserLimit".

    Returns:
        "" where it names none: the job itself is against the rules of its account or QOS.
    """
    found = _SUBMIT_LIMIT.search(said)
    return found[0] if found is not None else ""


def why_it_never_starts(reason: str) -> str:
    """Return why a job that waits for this reason never starts, and what to do; "" if it may."""
    return next((text for pattern, text in _NEVER_STARTS if pattern.fullmatch(reason)), "")
