"""The charts of the page of benchmarks: every bar is a row of the tables, also where ours loses."""

import re
import sys

import pytest

import package_source

sys.path.append(str(package_source.ROOT / "scripts"))
import site_charts

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
        site_charts.bars(chart, "<!-- load: begin -->\n| a |\n| - |\n| b |\n")
