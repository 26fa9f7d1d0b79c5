"""Regular expressions and globs of header filters; expectations were produced by the server's own libraries."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from nsqext.broker.engine.header_filter import InvalidExpression, compile_glob, compile_regexp, compile_wildcard

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
        ("^[[:alpha:_]$", ["a", "_"]),
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
def test_texts_that_an_expression_matches(pattern: str, found: list[str]) -> None:
    matches = compile_regexp(pattern)
    assert {text for text in TEXTS if matches(text)} == set(found)


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "(a", "a)", "*", "a|*", "a**", "a++", "a{2}{3}", "a{1001}", "a{2,1}", "(a{100}){11}", "(?=a)",
        "(?!a)", "(?<=a)", "(?>a)", "(?#a)", "(?P=a)", "(?x)a", "(?-)", "(?P<a b>c)", r"(a)\1", r"a\Z", r"\é",
        r"\C", r"[a]\C", r"\p{Klingon}", "\\", "[", "[a", "[]", "[b-a]", r"[a-\d]", "[[:foo:]]", r"\x{110000}", r"\x1",
        r"[]a]\C", r"[^]]\C", r"[[:alpha:]]\C", r"\Q\C\E\C", "(" * 1001 + ")" * 1001,
    ],
)  # fmt: skip
def test_expressions_refused_by_go(pattern: str) -> None:
    with pytest.raises(InvalidExpression):
        compile_regexp(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\\C", r"\Q\C\E", "[" + "(" * 2000 + "]", r"[[:alpha:](]", r"[]\](]", r"[^](]", r"\Q" + "(" * 2000,
        "(a)" * 2000, "(" * 1000 + "b" + ")" * 1000,
    ],
)  # fmt: skip
def test_expressions_that_only_look_refused(pattern: str) -> None:
    assert compile_regexp(pattern)("") is False


@pytest.mark.parametrize(("pattern", "text"), [(r"^\p{Han}$", "\u6f22"), (r"\pL", "\u00e9"), (r"^\P{Greek}$", "a")])
def test_unicode_classes(pattern: str, text: str) -> None:
    assert compile_regexp(pattern)(text)


def test_invalid_utf8_is_read_as_the_replacement_character() -> None:
    assert compile_regexp("^.$")("\udcff")
    with pytest.raises(InvalidExpression):
        compile_regexp("\udcff")


@pytest.mark.parametrize(
    ("compiled", "text"),
    [
        (compile_regexp("(a+)+$"), "a" * 60_000 + "!"),
        (compile_regexp("(?:(?:a?){30}){30}b"), "a" * 1_000),
        (compile_glob("*a" * 60), "a" * 2_000 + "b"),
        (compile_glob("*" * 1_000 + "b"), "a" * 10_000),
        (compile_wildcard("*a" * 60), "a" * 2_000 + "b"),
    ],
    ids=["nested plus", "nested optional", "glob", "stars", "name"],
)
def test_hostile_expressions_take_linear_time(compiled: Callable[[str], bool], text: str) -> None:
    # a backtracking engine needs hours for each of these; RE2 needs milliseconds
    started = time.process_time()
    assert not compiled(text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("a*", "abc", "bac"),
        ("a?c", "abc", "ac"),
        ("[!a]bc", "xbc", "abc"),
        ("[a^]b", "^b", "cb"),
        ("[a-c]b", "bb", "-b"),
        ("[a-c]", "c", "d"),
        ("[ab-]", "-", "c"),
        ("[!-]", "a", "-"),
        (r"[\]a]", "]", "\\"),
        ("{abc,x?c}", "xyc", "abcc"),
        ("x{a,{b,c}}", "xc", "x{"),
        ("{ab", "ab", "{ab"),
        ("a}", "a}", "a"),
        (r"a\*", "a*", "ab"),
        (r"a\*b", "a*b", "ab"),
        ("a\\", "a", "a\\"),
        ("a", "a", ""),
        ("[!a]b", "xb", "x"),
        ("a.c", "a.c", "abc"),
        ("a,b", "a,b", "a"),
        ("a*c", "a\nc", "a"),
        ("?", "", "ab"),
        ("[!a]", "", "a"),
        ("a?", "ab", "a"),
    ],
)
def test_globs(glob: str, yes: str, no: str) -> None:
    matches = compile_glob(glob)
    assert matches(yes)
    assert not matches(no)


@pytest.mark.parametrize("glob", ["[", "[a", "[]", "[!]", "[b-a]", "[a-bc]", "[a-b", "[a-", "[a-]", "[\\]"])
def test_invalid_globs(glob: str) -> None:
    with pytest.raises(InvalidExpression):
        compile_glob(glob)


def test_re2_writes_no_log_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidExpression):
        compile_regexp("(")
    assert compile_wildcard("?" * 50_000)("a" * 50_000), "so long that RE2 uses another algorithm"
    assert capfd.readouterr().err == ""
