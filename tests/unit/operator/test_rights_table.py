"""The table of rights in docs/install.md is that of the chart's rules."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def test_the_table_lists_the_rights_that_the_chart_grants_in_the_namespaces_of_jobs():
    template = (ROOT / "helm/rljob/templates/_rules.tpl").read_text()
    rules = yaml.safe_load("\n".join(line for line in template.splitlines() if not line.startswith("{{")))
    granted = {resource: rule["verbs"] for rule in rules for resource in rule["resources"]}
    section = (ROOT / "docs/install.md").read_text().partition("\n## Rights\n")[2].partition("\n## ")[0]
    listed = {}
    for objects, verbs in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)[2:]:
        if not objects.startswith("own namespace:"):
            names = re.sub(" of the .*", "", objects).split(", ")
            listed |= {name: verbs.strip().split(", ") for name in names}
    assert listed == granted
