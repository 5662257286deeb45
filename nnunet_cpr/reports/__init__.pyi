from .reading import ReportError
from .writing import write_report

__all__ = ["ReportError", "write_report"]
