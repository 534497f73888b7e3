"""Serving on vLLM: variational routing inside the engine, and an uncertainty for every token over the OpenAI API.

    rows        how experts and signals travel from the worker to the API process
    engine      in the worker: a model loader, routing behind the gate, signals beside the experts (the vLLM plugin)
    values      from rows to what a client is given
    reading     from vLLM's outputs to the choices of a response
    api         in the API process: `choices[i].uncertainty`
    launch      what `vmoer serve` checks before it starts vLLM
    merging     `vmoer merge`: a run without an adapter, as engines want it

Only `engine` and `api` import vLLM.
"""
