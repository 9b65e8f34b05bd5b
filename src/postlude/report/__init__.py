"""Reports: what was captured, collected while a graph is compiled; and how a check is shown, in a terminal or as a page."""

from postlude.report.collection import Collection, collect, collecting, listening

__all__ = ["Collection", "collect", "collecting", "listening"]
