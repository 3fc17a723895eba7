# CUDA image of qerl-pl with vLLM and the kernels of the `gpu` extra.
#
#   docker build -t qerl-pl .
#   docker run --gpus all --ipc=host -v $PWD/runs:/work/runs -v qerl-hub:/home/qerl/.cache/huggingface qerl-pl doctor
#   docker run --gpus all --ipc=host -v $PWD/runs:/work/runs -v qerl-hub:/home/qerl/.cache/huggingface qerl-pl \
#       fit -c gsm8k -c qwen2.5-7b -c nvfp4 --ckpt_path last
#
# vLLM's wheel brings the CUDA libraries; the devel image brings the compiler that Triton calls, and Humming for MXFP4.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/qerl
ENV PATH=/opt/qerl/bin:$PATH
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir '.[gpu]'

RUN useradd --create-home qerl && mkdir --parents /work/runs /home/qerl/.cache/huggingface \
    && chown --recursive qerl /work /home/qerl
USER qerl
WORKDIR /work
VOLUME ["/work/runs", "/home/qerl/.cache/huggingface"]
ENTRYPOINT ["qerl"]
CMD ["doctor"]
