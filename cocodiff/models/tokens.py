"""The segments that the families' sequences consist of: an image's tokens and those of the text that describes it.

The word image or text, as the name of a segment, is said here and in the families' files alone."""

from cocodiff.topology.segments import Segment

IMAGE, TEXT = "image", "text"


def image_segment(tokens: int) -> Segment:
    """An image's tokens change little from step to step, so V-Major may keep some back. Every rank has some."""
    return Segment(IMAGE, tokens, on_every_rank=True, may_stay=True)


def text_segment(tokens: int) -> Segment:
    """A text's tokens: few, and some ranks may have none."""
    return Segment(TEXT, tokens, dealt_from="back")


def image_and_text(image_tokens: int, text_tokens: int, text_first: bool = False) -> tuple[Segment, Segment]:
    """Joint attention over both, in the model's order."""
    image, text = image_segment(image_tokens), text_segment(text_tokens)
    return (text, image) if text_first else (image, text)
