"""The sizes of GNMT v2, in both frameworks."""

from dataclasses import dataclass

from baechi_ext.errors import OptionError

UNIT_TYPES = ("lstm", "gru")
ENCODER_TYPES = ("gnmt", "bi", "uni")


@dataclass(frozen=True, slots=True)
class Options:
    """The sizes, under the names and with the defaults of Baechi's flags."""

    batch_size: int = 32
    vocab_size: int = 5000
    """Size of each language's vocabulary."""
    max_seq_length: int = 30
    """Steps of every source and target."""
    rnn_units: int = 1024
    """Also the width of the embeddings and of the attention."""
    rnn_unit_type: str = "lstm"
    num_layers: int = 2
    """Layers of the encoder, and of the decoder."""
    encoder_type: str = "gnmt"
    """gnmt: one bidirectional layer, the others forward; bi: half of the layers in each direction; uni: all forward."""
    residual: bool = False
    rnn_chunk: int = 5
    """Time steps per op, or per tensor between layers."""
    num_devices: int = 1
    """Only for the expert's hints: with more devices than layers the output projection has one of its own."""

    def layers_of_encoder(self) -> tuple[int, int]:
        """Numbers of its bidirectional layers, and of the others, which follow. Raises OptionError where that can't be."""
        if self.encoder_type not in ENCODER_TYPES:
            raise OptionError(f"--encoder_type={self.encoder_type} is unknown; choose one of {', '.join(ENCODER_TYPES)}")
        match self.encoder_type:
            case "gnmt" if self.num_layers >= 2:
                return 1, self.num_layers - 1
            case "bi" if self.num_layers % 2 == 0:
                return self.num_layers // 2, 0
            case "uni":
                return 0, self.num_layers
        needed = "at least 2" if self.encoder_type == "gnmt" else "an even number of"
        raise OptionError(f"--num_layers={self.num_layers} does not suit --encoder_type={self.encoder_type}; it takes {needed} layers")
