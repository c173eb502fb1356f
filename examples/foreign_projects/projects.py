"""All projects, kind by kind."""

from __future__ import annotations

import language
import physics
import recommenders
import routing
import science
import tabular
import time_series
import vision

KINDS = (time_series, language, recommenders, tabular, science, physics, routing, vision)
PROJECTS = tuple(project for kind in KINDS for project in kind.PROJECTS)
