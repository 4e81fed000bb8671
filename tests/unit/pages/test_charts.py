from __future__ import annotations

import re
from xml.dom import minidom

import pytest
from markupsafe import Markup

from kvgen.pages import numbers, svg
from kvgen.pages.bars import Bar, bar_chart
from kvgen.pages.course import Course, course_chart


def boxes(chart: str, class_: str) -> list[dict[str, float]]:
    """Place and size of the rectangles of a class."""
    found = minidom.parseString(chart).getElementsByTagName("rect")
    return [{name: float(one.getAttribute(name)) for name in ("x", "y", "width")} for one in found if one.getAttribute("class") == class_]


def test_text_and_attributes_are_escaped():
    made = svg.text(1, 2.5, "<a & b>", class_='"x"')
    assert str(made) == '<text x="1" y="2.5" class="&#34;x&#34;">&lt;a &amp; b&gt;</text>'
    assert str(svg.element("g", Markup("<b/>"), stroke_width=1.0, fill=None)) == '<g stroke-width="1"><b/></g>'


def test_ticks_are_round_and_few():
    assert svg.ticks(0, 9.3) == [0, 5]
    assert svg.ticks(0, 100) == [0, 50, 100]
    assert svg.ticks(125, 190, most=6) == [140, 160, 180]
    assert svg.log_ticks(3, 60) == [5, 10, 20, 50]


def test_scales_map_ends_to_ends():
    assert [svg.linear((0, 10), (100, 200))(value) for value in (0, 5, 10)] == [100, 150, 200]
    place = svg.logarithmic((1, 100), (50, 0))
    assert [place(value) for value in (1, 10, 100)] == pytest.approx([50, 25, 0])
    assert svg.linear((3, 3), (0, 10))(3) == 0  # one value is no range


def test_a_bar_is_as_long_as_its_time_and_solid_for_its_read():
    chart = bar_chart([Bar("other", 200.0, 100.0), Bar("ours", 50.0, 45.0, ours=True), Bar("bare", 100.0)], "times")
    (whole, bare), (ours,) = boxes(chart, "other-pale"), boxes(chart, "ours-pale")
    assert whole["width"] == 4 * ours["width"] == 2 * bare["width"]
    (read,) = boxes(chart, "ours")
    assert read["width"] == pytest.approx(0.9 * ours["width"], abs=0.02)
    assert boxes(chart, "other")[1]["width"] == bare["width"]  # nothing is known of a read
    assert "50 µs (.90)" in chart


def test_a_read_that_took_longer_than_the_kernel_stays_in_its_bar():
    chart = bar_chart([Bar("odd", 50.0, 60.0)], "times")
    assert boxes(chart, "other")[0]["width"] == boxes(chart, "other-pale")[0]["width"]


def test_a_course_falls_in_steps_to_its_best():
    chart = course_chart([Course("cpu", ((1.0, 40.0), (2.0, 60.0), (3.0, 20.0))), Course("cuda", ((2.0, 30.0),))], "search")
    minidom.parseString(chart)
    (path, _) = re.findall(r' d="([^"]+)"', chart)
    levels = [float(value) for value in re.findall(r"[V ]([\d.]+)", path)]
    assert levels == sorted(levels)  # y grows downwards
    assert levels[0] < levels[-1]
    assert chart.count("<circle") == 4
    assert "cpu 20 µs" in chart
    assert "cuda 30 µs" in chart


def test_labels_of_courses_that_end_alike_lie_apart():
    chart = course_chart([Course("a", ((1.0, 20.0),)), Course("b", ((1.0, 20.01),))], "search")
    places = [float(y) for y in re.findall(r'y="([\d.]+)" class="d\d small"', chart)]
    assert abs(places[0] - places[1]) >= 14


def test_numbers_read_well():
    assert [numbers.microseconds(us) for us in (None, 4.96, 999.4, 999.6, 1234, 999_600, 2_345_678)] == [
        "–", "4.96 µs", "999 µs", "1 ms", "1.23 ms", "1 s", "2.35 s",
    ]  # fmt: skip
    assert [numbers.fraction(one) for one in (None, 0.956, 1.0, 0.0)] == ["–", ".96", "1.00", ".00"]
    assert [numbers.factor(one) for one in (None, 1.504, 26.68)] == ["–", "1.50×", "26.7×"]
    assert [numbers.count(one) for one in (1, 512, 1024, 3 << 20, 32000)] == ["1", "512", "1K", "3M", "32000"]
