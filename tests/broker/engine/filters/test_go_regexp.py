"""Regular expressions and globs of header filters; what the servers' own libraries said about each."""

from __future__ import annotations

import re

import pytest

from nsqext.broker.engine.filters.go_regexp import glob_expression, re2_expression

TEXTS = ["", "a", "b", "A", "ab", "é", "1", "a\n", "_", "*", " ", "\v", "aaa", "a\nb", "-", "]"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a$", ["a", "aaa"]),
        (r"^a\z", ["a"]),
        ("(?m)a$", ["a", "a\n", "aaa", "a\nb"]),
        ("^b", ["b"]),
        ("(?m:^)b", ["b", "a\nb"]),
        ("^.$", ["a", "b", "A", "é", "1", "_", "*", " ", "\v", "-", "]"]),
        ("a(?s).b", ["a\nb"]),
        ("a.b", []),
        ("(?i)A|x", ["a", "A", "ab", "a\n", "aaa", "a\nb"]),
        ("A|(?i)B", ["b", "A", "ab", "a\nb"]),
        ("(?:(?i)B)|x(?i-s:y)", ["b", "ab", "a\nb"]),
        (r"^\w$", ["a", "b", "A", "1", "_"]),
        (r"^\W$", ["é", "*", " ", "\v", "-", "]"]),
        (r"\s", ["a\n", " ", "a\nb"]),
        (r"^[\d-]$", ["1", "-"]),
        (r"^[[:alpha:]]$", ["a", "b", "A"]),
        (r"^[[:^alpha:]]$", ["é", "1", "_", "*", " ", "\v", "-", "]"]),
        (r"^[\W]$", ["é", "*", " ", "\v", "-", "]"]),
        ("^[]a]$", ["a", "]"]),
        ("^[^]a]$", ["b", "A", "é", "1", "_", "*", " ", "\v", "-"]),
        (r"\Qa*\E|\Q*", ["*"]),
        (r"\x61b|\x{62}$|\060|\61", ["b", "ab", "1", "a\nb"]),
        (r"^a{3}$|^b{1,}$", ["b", "aaa"]),
        ("^a{,2}$|_{0,1}?$", TEXTS),
        (r"\Bb", ["ab"]),
        (r"\bb", ["b", "a\nb"]),
        (r"\B", ["", "ab", "é", "a\n", "*", " ", "\v", "aaa", "-", "]"]),
        ("(?P<x>a)(?<x>b)", ["ab"]),
        ("^*b()", ["b", "ab", "a\nb"]),
        (r"\_|\-", ["_", "-"]),
        ("a(?i)*$", TEXTS),
        ("(?)b(?U:c*)", ["b", "ab", "a\nb"]),
    ],
)
def test_what_an_expression_finds(pattern: str, found: list[str]) -> None:
    expression = re.compile(re2_expression(pattern))
    assert {text for text in TEXTS if expression.search(text)} == set(found)


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "(a", "a)", "*", "a|*", "a**", "a++", "a{2}{3}", "a{1001}", "a{2,1}", "(a{100}){11}", "(?=a)",
        "(?!a)", "(?<=a)", "(?>a)", "(?#a)", "(?P=a)", "(?x)a", "(?-)", "(?P<a b>c)", r"(a)\1", r"a\Z", r"\é",
        r"\C", r"\pL", "\\", "[", "[a", "[]", "[b-a]", r"[a-\d]", "[[:foo:]]", r"\x{110000}", r"\x1",
    ],
)  # fmt: skip
def test_what_is_no_expression(pattern: str) -> None:
    with pytest.raises(re.error):
        re2_expression(pattern)


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("a*", "abc", "bac"),
        ("a?c", "abc", "ac"),
        ("[!a]bc", "xbc", "abc"),
        ("[a^]b", "^b", "cb"),
        ("[a-c]b", "bb", "-b"),
        ("[ab-]", "-", "c"),
        ("[!-]", "a", "-"),
        (r"[\]a]", "]", "\\"),
        ("{abc,x?c}", "xyc", "abcc"),
        ("x{a,{b,c}}", "xc", "x{"),
        ("{ab", "ab", "{ab"),
        ("a}", "a}", "a"),
        (r"a\*", "a*", "ab"),
        ("a\\", "a", "a\\"),
        ("a.c", "a.c", "abc"),
        ("a,b", "a,b", "a"),
        ("a*c", "a\nc", "a"),
        ("?", "", "ab"),
        ("[!a]", "", "a"),
        ("a?", "ab", "a"),
    ],
)
def test_globs(glob: str, yes: str, no: str) -> None:
    expression = re.compile(glob_expression(glob), re.DOTALL)
    assert expression.fullmatch(yes)
    assert not expression.fullmatch(no)


@pytest.mark.parametrize("glob", ["[", "[a", "[]", "[!]", "[b-a]", "[a-bc]", "[a-b", "[\\]"])
def test_what_is_no_glob(glob: str) -> None:
    with pytest.raises(re.error):
        glob_expression(glob)
