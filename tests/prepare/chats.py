"""Chat templates and chats for the tests of `prepare`."""

from __future__ import annotations

from eagle3_fast.records import Conversation, Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like the reasoning families: earlier reasoning is dropped, the last reply gets its reasoning or an empty block.
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}"
    "{% set c = m.content %}{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + r.strip() + '\n</think>\n\n' }}{% endif %}{{ c.strip() + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def words(*turns: str, source: str = "test:1") -> Conversation:
    """Turns as a chat, user first."""
    return Conversation(tuple(Message("user" if i % 2 == 0 else "assistant", turn) for i, turn in enumerate(turns)), source)
