"""Mistakes in the pytest plugin."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "the farthest mark of the plugin wins",
        "testing/plugin.py",
        "given = {**mark.kwargs, **given}",
        "given = {**given, **mark.kwargs}",
    ),
    Mistake(
        "the closest mark of the plugin hides the others",
        "testing/plugin.py",
        "given = {**mark.kwargs, **given}",
        "given = given or dict(mark.kwargs)",
    ),
    Mistake(
        "positional arguments of the mark are ignored",
        "testing/plugin.py",
        "        if mark.args:\n",
        "        if False:\n",
    ),
    Mistake(
        "a topic that the test deleted is an error",
        "testing/plugin.py",
        "    except TopicNotFound:\n        return",
        "    except KeyError:\n        return",
    ),
    Mistake(
        "the topic is not deleted after the test",
        "testing/plugin.py",
        "        nsq_cluster.delete_topic(name)\n",
        "        pass\n",
    ),
    Mistake(
        "the default channel is created on the original NSQ",
        "testing/plugin.py",
        'if str(request.config.getini("nsqext_generation")) == "redesigned":',
        "if True:",
    ),
    Mistake(
        "the plugin ignores the number of lookup nodes",
        "testing/plugin.py",
        "lookupds=lookupds, generation",
        "lookupds=1, generation",
    ),
    Mistake(
        "a long name of a test is not cut",
        "testing/plugin.py",
        "request.node.name)[:_NAME]",
        "request.node.name)",
    ),
    Mistake(
        "two tests of a name share a topic",
        "testing/plugin.py",
        '_{token_hex(4)}"',
        '_topic"',
    ),
    Mistake(
        "the generation of the plugin's cluster is fixed",
        "testing/plugin.py",
        "lookupds=lookupds, generation=generation)",
        "lookupds=lookupds)",
    ),
    Mistake(
        "the number of nodes is fixed",
        "testing/plugin.py",
        "with Cluster(nodes, lookupds",
        "with Cluster(3, lookupds",
    ),
    Mistake(
        "a wrong argument of the mark is a TypeError",
        "testing/plugin.py",
        "except TypeError as error:",
        "except KeyError as error:",
    ),
    Mistake(
        "a text in place of a number is a ValueError",
        "testing/plugin.py",
        "if not text.isdecimal():",
        "if not text:",
    ),
    Mistake(
        "the mark is not registered",
        "testing/plugin.py",
        '        "markers",\n',
        '        "filterwarnings",\n',
    ),
    Mistake(
        "names keep characters that servers refuse",
        "testing/plugin.py",
        "re.sub('[^a-zA-Z0-9_-]', '_', request.node.name)",
        "re.sub('[^a-zA-Z0-9_[-]', '_', request.node.name)",
    ),
    Mistake(
        "the default channel hides those of the mark",
        "testing/plugin.py",
        "    options |= given\n",
        "    options = given | options\n",
    ),
    Mistake(
        "the mark's channels are added without the default",
        "testing/plugin.py",
        'options["channels"] = [DEFAULT_CHANNEL]',
        'options["channels"] = []',
    ),
)
