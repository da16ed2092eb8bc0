# Two stages: wheels are built where compilers are, and installed where they are not.
#
#   docker build --tag edl-hvd .
#   docker build --tag edl-hvd:cpu --build-arg BASE=ubuntu:24.04 --build-arg RUNTIME=ubuntu:24.04 --build-arg BUILD_ARGS= .
#
#   docker run --rm --gpus all --shm-size=1g --volume "$PWD:/job" --workdir /job edl-hvd \
#       edlrun -np 2 --min-np 1 python train.py
#   docker run --detach --network host --gpus all --volume ~/.ssh/job.pub:/home/worker/.ssh/authorized_keys:ro edl-hvd
#
# The second form waits for a launcher on another host: edlrun --ssh-port 2222 ... (ssh as the user "worker").
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG RUNTIME=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE} AS wheels

# A build has no GPU in sight, so GPU collectives have to be asked for.
ARG BUILD_ARGS=--with-nccl

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git libopenmpi-dev make openmpi-bin python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY setup.cfg setup.py pyproject.toml constraints.txt README.md LICENSE ./
COPY discovery_scripts discovery_scripts
COPY examples/traces examples/traces
COPY edl_hvd edl_hvd

# The cache mount keeps packages and the compiled Horovod between builds; a wheel is used again only when it
# was built from exactly the same things. What a worker needs is installed into a folder of its own.
RUN --mount=type=cache,target=/root/.cache \
    python3 -m venv /opt/build \
    && /opt/build/bin/pip install --constraint constraints.txt '.[torch,build-horovod]' \
    && /opt/build/bin/edl-hvd build-horovod ${BUILD_ARGS} --wheel /wheels \
    && /opt/build/bin/pip wheel --no-deps --wheel-dir /wheels . \
    && python3 -m venv /opt/edl_hvd \
    && /opt/edl_hvd/bin/pip install --constraint constraints.txt \
        "$(ls /wheels/edl_hvd-*.whl)[torch,aws]" /wheels/horovod-*.whl 'setuptools<81'

FROM ${RUNTIME}

ARG VERSION=unknown
LABEL org.opencontainers.image.title="edl_hvd" \
    org.opencontainers.image.description="A worker of elastic training for PyTorch on Horovod" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}"

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates openmpi-bin openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --shell /bin/bash worker \
    && install --directory --owner worker --group worker --mode 700 /home/worker/.ssh /home/worker/sshd

COPY --from=wheels /opt/edl_hvd /opt/edl_hvd
ENV PATH=/opt/edl_hvd/bin:${PATH}

USER worker
WORKDIR /home/worker

# Keys only, on a port of its own, which any user may open; --network host leaves 22 to the host's sshd.
# A login is given this PATH, too.
RUN printf '%s\n' 'Port 2222' 'PasswordAuthentication no' 'PermitRootLogin no' 'UsePAM no' \
        'HostKey /home/worker/sshd/key' 'PidFile /home/worker/sshd/pid' "SetEnv PATH=${PATH}" \
        > /home/worker/sshd/config
EXPOSE 2222

# The host key is made when a container starts; baked into the image, every container would have the same.
CMD ["sh", "-c", "rm -f sshd/key && ssh-keygen -q -t ed25519 -N '' -f sshd/key && exec /usr/sbin/sshd -D -e -f sshd/config"]
