from .page import write_report
from .reading import ReportError

__all__ = ["ReportError", "write_report"]
