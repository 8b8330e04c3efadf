"""Figures as PNG: small for a report, fast for a widget."""

from base64 import b64encode
from io import BytesIO

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image


def bundle(figure: Figure, alt: str) -> tuple[dict, dict]:
    """The figure as a display's data and metadata."""
    image = pixels(figure).quantize(128, dither=Image.Dither.NONE)  # a palette makes a third of the size
    png = b64encode(encode(image, optimize=True)).decode()
    return {"image/png": png, "text/plain": alt}, {"image/png": {"alt": alt}}


def png(figure: Figure) -> bytes:
    """The figure as PNG, drawn and packed for speed, not for size."""
    return encode(pixels(figure), compress_level=1)


def pixels(figure: Figure) -> Image.Image:
    """The figure drawn, once: `savefig` would draw it twice."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def encode(image: Image.Image, **options: object) -> bytes:
    """The bytes of a PNG file."""
    buffer = BytesIO()
    image.save(buffer, format="png", **options)
    return buffer.getvalue()
