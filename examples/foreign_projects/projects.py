"""All projects, kind by kind."""

from __future__ import annotations

import language
import recommenders
import routing
import science
import tabular
import time_series

KINDS = (language, time_series, recommenders, tabular, science, routing)
PROJECTS = tuple(project for kind in KINDS for project in kind.PROJECTS)
