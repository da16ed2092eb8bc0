# The image does what `make setup` does, on a CUDA base, with sshd for jobs over several hosts.
#
#   docker build --tag edl-hvd .
#   docker build --tag edl-hvd:cpu --build-arg BASE=ubuntu:24.04 --build-arg BUILD_ARGS= .
#
#   docker run --rm --gpus all --shm-size=1g edl-hvd make imagenet-demo
#   docker run --detach --network host --gpus all --volume ~/.ssh/job.pub:/root/.ssh/authorized_keys:ro edl-hvd
#
# The second form waits for a launcher on another host: horovodrun --ssh-port 2222 ...
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# A build has no GPU in sight, so GPU collectives have to be asked for.
ARG BUILD_ARGS=--with-nccl

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git libopenmpi-dev make openmpi-bin openssh-client openssh-server \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

WORKDIR /opt/edl_hvd

# The cache mount keeps packages and the compiled Horovod between builds; a wheel is used again only when it
# was built from exactly the same things.
COPY Makefile setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY edl_hvd edl_hvd
RUN --mount=type=cache,target=/root/.cache make setup BUILD_ARGS="${BUILD_ARGS}"
COPY . .

ENV PATH=/opt/edl_hvd/.venv/bin:${PATH}

# Keys only, on a port of its own: with --network host the host's sshd has 22.
RUN mkdir -p /run/sshd /root/.ssh \
    && chmod 700 /root/.ssh \
    && printf '%s\n' 'Port 2222' 'PasswordAuthentication no' 'PermitRootLogin prohibit-password' \
        > /etc/ssh/sshd_config.d/edl_hvd.conf
EXPOSE 2222

# Host keys are made when a container starts; baked into the image, every container would have the same.
CMD ["sh", "-c", "ssh-keygen -A && exec /usr/sbin/sshd -D -e"]
