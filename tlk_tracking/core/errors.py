"""Everything this package raises on purpose.

TlkError
├── TraceError            a Kineto trace cannot be read
├── AnnotationError       an annotation's files are damaged or do not fit each other
├── TrackingError         an MLflow run cannot be read or written
├── ComparisonError       two annotations cannot be compared as asked
├── ConfigurationError    an argument is wrong; says what to give instead
└── RecordingError        a recording cannot begin or cannot be finished here
"""

from __future__ import annotations


class TlkError(Exception):
    """Base of every error that this package raises on purpose."""


class TraceError(TlkError):
    """A Kineto trace cannot be read."""


class AnnotationError(TlkError):
    """An annotation's files are damaged or do not fit each other.

    Attributes:
        file: name of the file inside the annotation, or None when it is about the folder.
        row: row number in that file, or None when it is about the whole file.
        field: column or manifest field, or None.
    """

    def __init__(
        self, what: str, *, file: str | None = None, row: int | None = None, field: str | None = None
    ) -> None:
        where = [
            part
            for part in (
                file,
                None if row is None else f"row {row}",
                None if field is None else f"field {field}",
            )
            if part is not None
        ]
        super().__init__(f"{', '.join(where)}: {what}" if where else what)
        self.file = file
        self.row = row
        self.field = field


class TrackingError(TlkError):
    """An MLflow run cannot be read or written.

    Attributes:
        run_is_missing: whether the store answers that it has no such run.
    """

    def __init__(self, what: str, *, run_is_missing: bool = False) -> None:
        super().__init__(what)
        self.run_is_missing = run_is_missing


class ComparisonError(TlkError):
    """Two annotations cannot be compared as asked."""


class ConfigurationError(TlkError, ValueError):
    """An argument is wrong; the message says what to give instead."""


class RecordingError(TlkError, RuntimeError):
    """A recording cannot begin or cannot be finished here."""
