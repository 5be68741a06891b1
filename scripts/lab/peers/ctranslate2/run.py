"""CTranslate2, plain; it has no speculative decoding."""

import json
from pathlib import Path

import ctranslate2
from ctranslate2.converters import transformers as converters
from peer_job import converted, main
from ways import QUANTIZATIONS, check, decoding_options, translator_options


class T5Loader(converters.T5Loader):
    """Scaled where Transformers scales: CTranslate2 asks whether the head is tied, which Transformers 5 always says."""

    def get_model_spec(self, model):
        """Return the model in CTranslate2's form."""
        model.config.tie_word_embeddings = model.config.scale_decoder_outputs
        return super().get_model_spec(model)


def load(job):
    def convert(checkpoint, out):
        converters.register_loader("T5Config")(T5Loader)
        converter = converters.TransformersConverter(str(checkpoint))
        converter.convert(out / "model", quantization=QUANTIZATIONS[job["weights"]])

    check(job)
    folder = converted(job, "target", convert) / "model"
    translator = ctranslate2.Translator(str(folder), **translator_options(job))
    tokens = vocabulary(folder)
    ids = {token: at for at, token in enumerate(tokens)}
    options = decoding_options(job)

    def run(sources):
        batch = [[tokens[token] for token in source] for source in sources]
        made = translator.translate_batch(batch, **options)
        return [[ids[token] for token in one.hypotheses[0]] for one in made]

    return run


def vocabulary(folder: Path) -> list[str]:
    """Tokens by their ids, which are the checkpoint's."""
    return json.loads((folder / "shared_vocabulary.json").read_text())


if __name__ == "__main__":
    main(load)
