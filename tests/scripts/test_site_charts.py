"""Charts of the site: every bar and point is a row of the tables, also where ours loses."""

import re
import sys

import pytest

from project import package_source

sys.path.append(str(package_source.ROOT / "scripts"))
import site_charts
import site_curves

TEXT = site_charts.TABLES.read_text()


@pytest.mark.parametrize("name", site_charts.CHARTS)
def test_bars_are_the_rows_of_the_tables(name: str) -> None:
    drawn = site_charts.bars(site_charts.CHARTS[name], TEXT)
    assert len(drawn) >= 2
    for bar in drawn:
        assert f"| {bar.said} |" in TEXT
        assert bar.low <= bar.median <= bar.high
    picture = site_charts.svg(name)
    assert picture.count("<rect") == len(drawn)
    assert "\n" not in picture
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', picture)]
    by_median = sorted(zip([bar.median for bar in drawn], widths, strict=True))
    assert [width for _, width in by_median] == sorted(widths)


def test_rows_where_ours_loses_are_there_and_marked() -> None:
    chart = site_charts.CHARTS["load"]
    lost = [bar for bar in site_charts.bars(chart, TEXT) if bar.median > 1]
    assert lost
    assert site_charts.svg("load").count('class="lost"') == len(lost)


def test_the_page_has_each_chart_once() -> None:
    page = (package_source.ROOT / "docs" / "benchmarks.md").read_text()
    assert sorted(re.findall(r"<!-- chart: ([a-z-]+) -->", page)) == sorted(site_charts.CHARTS)


def test_a_table_that_is_gone_is_missed() -> None:
    chart = site_charts.CHARTS["load"]
    with pytest.raises(LookupError, match="no table 0"):
        site_charts.bars(chart, TEXT.replace("<!-- load: begin -->", ""))
    with pytest.raises(LookupError, match="no rows"):
        site_charts.bars(chart, "<!-- load: begin -->\n| compared |\n| - |\n| b |\n")


def test_a_column_that_is_gone_is_missed() -> None:
    with pytest.raises(LookupError, match="no column 'compared'"):
        site_charts.bars(site_charts.CHARTS["load"], TEXT.replace("| compared |", "| other |"))


def test_curves_are_the_rows_of_the_tables() -> None:
    page = (package_source.ROOT / "docs" / "study-substitution.md").read_text()
    assert re.findall(r"<!-- chart: (.*) -->", page) == [*site_curves.CURVES]
    for name in site_curves.CURVES:
        drawn = site_curves.plotted(name, TEXT)
        assert any(each.best for each in drawn)
        picture = site_curves.svg(name)
        assert picture.count("<title>") == len(drawn)
        assert picture.count('class="best"') == sum(each.best for each in drawn)
        assert "\n" not in picture
        for each in drawn:
            assert each.low <= each.score <= each.high
            smaller = [o for o in drawn if o.size < each.size and o.score > each.score]
            assert not (each.best and smaller)
