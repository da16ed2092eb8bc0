"""What runs each command that the documents show."""

from __future__ import annotations

import sys
from dataclasses import dataclass

# For ``make``: what set-up has installed is there already.
INSTALLED = f"-o setup VENV={sys.prefix}"
# A training of seconds instead of days.
SHORT = "--arch resnet18 --image-size 32 --epochs 1 --limit-batches 2 --global-batch 64 --micro-batch 32 --workers 0"


@dataclass(frozen=True)
class Here:
    """Run by ``test_commands.py``, as it is written but for what it names.

    Attributes:
        swaps: Names of the documents' world, to those of this one; braces stand for a fixture's value.
        more: Words added at the end.
        prints: What the output has to hold.
        exit_code: What it has to end with.
        variables: More environment variables.
        waits: Whether it takes a minute, and begins before the others.
    """

    swaps: tuple[tuple[str, str], ...] = ()
    more: str = ""
    prints: str = ""
    exit_code: int = 0
    variables: tuple[tuple[str, str], ...] = ()
    waits: bool = False


@dataclass(frozen=True)
class By:
    """Run by another test."""

    test: str


@dataclass(frozen=True)
class Ci:
    """Run by CI, as a step of ``.ci/run`` or in the recipe of such a step."""

    step: str


OVER_SSH = "tests/hosts/test_ssh.py::test_the_command_for_real_hosts_goes_on_when_a_host_joins_and_a_worker_is_killed"
ON_EC2 = "tests/hosts/test_ssh.py::test_the_command_for_ec2_trains_on_the_tagged_instances"
WITH_EDLRUN = "tests/hosts/test_ssh.py::test_the_commands_of_edlrun_for_several_hosts"
BY_AGENTS = "tests/elastic/test_agents.py::test_a_host_leaves_and_another_comes_and_no_sample_is_lost"
MINIMAL = "tests/elastic/test_minimal.py::test_hosts_come_and_go_and_the_loss_is_that_of_one_process"
# As a part of another command of this table.
IN_ANOTHER = "tests/docs/test_commands.py::test_the_command_works"
BY_SUITE = "tests/contract/test_discovery_contract.py::test_an_answer_is_the_sorted_hosts_and_nothing_else"
READ_BY_HOROVOD = "tests/contract/test_discovery_contract.py::test_horovod_reads_the_answer"
# Nothing is downloaded or installed: pip reads the package, finds its extras, and says what it would do.
DRY = (("PIP_DRY_RUN", "1"), ("PIP_NO_INDEX", "1"), ("PIP_NO_DEPS", "1"), ("PIP_NO_BUILD_ISOLATION", "0"))
COLLECTS = Here(more=INSTALLED, prints="tests collected", variables=(("PYTEST_ADDOPTS", "--collect-only -q"),))
ON_LOOPBACK = ("eth0", "lo")
DIGITS = ("/data/imagenet", "{digits}")
SPOT = ("spot.csv", "examples/traces/spot-day.csv")
TRAINED = ("s3://bucket/resnet50", "{trained}")

DELETED = "tests/elastic/test_fleet.py::test_a_deleted_job_leaves_nothing_and_another_may_have_its_name"
FLEET = "tests/elastic/test_fleet.py::test_the_commands_of_the_document"

IMAGES = "tests/unit/distill/test_distill_data_examples.py::test_a_teacher_is_trained_and_teaches_what_it_has_learned"
GUIDE = (
    "tests/hosts/test_distill_hosts.py::test_the_guide_for_three_hosts_and_a_host_of_teachers_that_goes_and_comes_back"
)
OPERATOR = "tests/kubernetes/test_operator.py::test_a_job_runs_is_scaled_suspended_and_resumed_with_kubectl"
ENDS = "tests/kubernetes/test_operator.py::test_a_lost_worker_is_replaced_and_a_launcher_ends_the_job"

HOW: dict[str, Here | By | Ci] = {
    r"printf 'localhost:4\n' > hosts.txt": By(FLEET),
    "edl-hvd fleet serve --discover file:hosts.txt": By(FLEET),
    "edl-hvd fleet serve --discover file:hosts.txt --http 8400":
        By("tests/elastic/test_fleet.py::test_a_job_tells_the_fleet_how_it_scales_and_what_is_left"),
    "edl-hvd fleet submit --name resnet50 --min 1 --max 4 -- python train.py": By(FLEET),
    "edl-hvd fleet list": By(FLEET),
    "edl-hvd fleet submit --name resnet50-again --min 1 --max 4 --family resnet50 -- python train.py": By(FLEET),
    "edl-hvd fleet show resnet50": By(FLEET),
    "edl-hvd fleet scale resnet50 --max 2": By(FLEET),
    "edl-hvd fleet stop resnet50": By(FLEET),
    "edl-hvd fleet resume resnet50": By(FLEET),
    "edl-hvd fleet delete resnet50 --yes": By(DELETED),
    "edl-hvd fleet claim web --slots 2 --for 60s": By(FLEET),
    "edl-hvd fleet release web": By(FLEET),
    "edl-hvd fleet plan --with-job bert:2:8:5": By(FLEET),
    "edl-hvd fleet replay": By(FLEET),
    "edl-hvd train --min 1 --max 2 train.py": By(FLEET),
    "edl-hvd train --max 2 --here train.py": Here(prints="finished on rank 0 of 2"),
    "edl-hvd train --min 2 --max 8 --gpus 4 --kubernetes --image registry.example.com/resnet50 train.py":
        By("tests/kubernetes/test_train_command.py::test_a_job_is_submitted_with_one_command_and_runs"),
    "edl-hvd train --min 2 --max 8 --gpus 4 --kubernetes --image registry.example.com/resnet50 --dry-run train.py":
        Here(prints="nvidia.com/gpu: 4"),
    "edl-hvd operator --manifests --mpijobs > operator.yaml": Here(more="&& cat operator.yaml", prints="--mpijobs"),
    "edl-hvd operator --manifests > operator.yaml": Here(more="&& cat operator.yaml", prints="TrainingJob"),
    "edl-hvd operator --metrics-port 0.0.0.0:9400":
        By("tests/kubernetes/test_operator.py::test_when_an_operator_is_killed_another_takes_its_place"),
    "helm install edl-hvd charts/edl-hvd --namespace edl-hvd --create-namespace "
    "--set image=registry.example.com/edl-hvd":
        By("tests/unit/kubernetes/test_chart.py::test_the_chart_has_the_objects_of_the_manifests"),
    "kubectl apply -f operator.yaml": By(OPERATOR),
    "kubectl apply -f job.yaml": By(OPERATOR),
    "kubectl get tj -o wide": By(OPERATOR),
    "kubectl describe tj/resnet50": By(OPERATOR),
    "kubectl scale tj/resnet50 --replicas 4": By(OPERATOR),
    "kubectl wait tj/resnet50 --for=condition=Complete --timeout=24h": By(ENDS),
    "make test-kubernetes": Ci("make test-kubernetes"),
    "make imagenet-demo": Ci("make imagenet-demo"),
    "make cluster-demo": Ci("make cluster-demo"),
    "make distill-demo": Ci("make distill-demo"),
    "SHORT=1 EXACT=1 make distill-demo": Ci("SHORT=1 EXACT=1 make distill-demo"),
    "make test": Ci("make test"),
    "make test-docs": Ci("make test-docs"),
    "make test-distill": Ci("make test-distill"),
    "make test-learning": Ci("make test-learning"),
    "make test-learning LAUNCHER=horovodrun": COLLECTS,
    "make test-chaos": Ci("make test-chaos"),
    "make test-horovodrun": Ci("make test-horovodrun"),
    "make test-hosts": Ci("make test-hosts"),
    "make lint": Ci("make lint"),
    "make setup": Ci("make setup"),
    "make docs": By("tests/docs/test_site.py::test_every_public_name_has_its_place"),
    "SHORT=1 make imagenet-demo": Ci("SHORT=1 make imagenet-demo"),
    "SHORT=1 EXACT=1 SCHEDULE=7 make imagenet-demo": Ci("SHORT=1 EXACT=1 SCHEDULE=7 make imagenet-demo"),
    "SHORT=1 EXACT=1 LAUNCHER=horovodrun make imagenet-demo":
        Ci("SHORT=1 EXACT=1 LAUNCHER=horovodrun make imagenet-demo"),
    "edl-hvd build-horovod": Ci("make setup"),
    "edl-hvd build-horovod --check-only": Here(prints="allreduce over gloo"),
    "edl-hvd doctor": Here(prints="Ready to train"),
    "pip install '.[torch,build-horovod,aws]'": Here(prints="Would install edl-hvd", variables=DRY),
    "pip install '.[torch,build-horovod]'": Here(prints="Would install edl-hvd", variables=DRY),
    "pip install 'edl-hvd[aws]'": Here(prints="already satisfied", variables=DRY),
    "pip install 'edl-hvd[kubernetes]'": Here(prints="already satisfied", variables=DRY),
    "pip install 'edl-hvd[google]'": Here(prints="already satisfied", variables=DRY),
    "pip install 'edl-hvd[metrics]'": Here(prints="already satisfied", variables=DRY),
    "pip install 'edl-hvd[azure]'": Here(prints="already satisfied", variables=DRY),
    'pip install "edl-hvd[aws]"': Here(prints="already satisfied", variables=DRY),
    "edlrun -np 2 --min-np 1 python train.py": Here(prints="finished on rank 0 of 2"),
    "edlrun -np 3 --min-np 2 -H node-1:1,node-2:1,node-3:1 python train.py":
        By("tests/hosts/test_namespaces.py::test_the_command_of_the_documents_for_several_hosts"),
    "edlrun -np 2 --min-np 1 --record history.jsonl python train.py":
        Here(more="&& edl-hvd replay history.jsonl", prints="The job ended with exit code 0"),
    "edlrun -np 2 --min-np 1 --job-dir runs/resnet50 python train.py":
        Here(more="&& edl-hvd status runs/resnet50 && edlrun --resume --job-dir runs/resnet50 "
             "&& edl-hvd status runs/resnet50", prints="run 2"),
    "edlrun --resume --job-dir runs/resnet50": By(IN_ANOTHER),
    "edl-hvd status runs/resnet50": By("tests/elastic/test_job_dir.py::test_status_shows_a_job_while_it_trains"),
    "edl-hvd status runs/resnet50 --profile":
        By("tests/elastic/test_distill.py::test_students_resize_and_die_while_teachers_come_and_go"),
    "edl-hvd drain node-3 --job runs/resnet50": By(
        "tests/elastic/test_job_dir.py::test_a_host_that_is_drained_leaves_at_the_next_commit_and_nothing_is_lost"),
    "edl-hvd replay history.jsonl": By(IN_ANOTHER),
    "edl-hvd checkpoint list s3://bucket/resnet50": Here(swaps=(TRAINED,), prints="valid"),
    "edl-hvd checkpoint show s3://bucket/resnet50": Here(swaps=(TRAINED,), prints="model/weight"),
    "edl-hvd checkpoint verify s3://bucket/resnet50 --all": Here(swaps=(TRAINED,), prints="step 3: valid"),
    "edl-hvd checkpoint restore s3://bucket/resnet50 --to runs/again --step 9000":
        Here(swaps=(TRAINED, ("9000", "3")), more="&& edl-hvd checkpoint verify runs/again", prints="step 3: valid"),
    "edl-hvd checkpoint export s3://bucket/resnet50 model.safetensors":
        Here(swaps=(TRAINED,), more="&& test -s model.safetensors", prints="2 tensors of 'model', step 3"),
    "edl-hvd checkpoint export s3://bucket/resnet50 model.pt --prefix model":
        Here(swaps=(TRAINED,), more="&& test -s model.pt", prints="2 tensors of 'model', step 3"),
    "edl-hvd checkpoint copy s3://bucket/resnet50 /data/kept/resnet50":
        Here(swaps=(TRAINED, ("/data/kept", "kept")), more="&& edl-hvd checkpoint verify kept/resnet50",
             prints="step 3: valid"),
    "edl-hvd checkpoint prune s3://bucket/resnet50 --keep 3 --dry-run":
        Here(swaps=(TRAINED, ("--keep 3", "--keep 1")), prints="would be removed: step 2, 1"),
    r"printf 'localhost\n127.0.0.1\n' > hosts.txt": By(MINIMAL),
    "edlrun -np 2 --min-np 1 --discover file:hosts.txt python examples/minimal.py": By(MINIMAL),
    "echo 127.0.0.1 > hosts.txt": By(MINIMAL),
    "python examples/minimal.py": By(MINIMAL),
    "horovodrun -np 2 --min-np 1 --max-np 2 --network-interfaces lo --host-discovery-script "
    '"discovery_scripts/from_file hosts.txt" python examples/minimal.py':
        Here(swaps=(("hosts.txt", "local.txt"),), prints="workers 2"),
    "edlrun -np 2 --min-np 1 --max-np 8 --discover file:hosts.txt python train.py": By(WITH_EDLRUN),
    "edlrun -np 2 --min-np 1 --max-np 8 --discover ec2:tag=job=resnet50 python train.py": By(WITH_EDLRUN),
    "edlrun -np 2 --min-np 1 --max-np 8 --agents-port 7077 --token-file token python train.py": By(BY_AGENTS),
    "edl-hvd join 10.0.0.1:7077 --slots 4 --token-file token": By(BY_AGENTS),
    "python -c 'import secrets; print(secrets.token_urlsafe())' > token": Here(),
    "python train.py": By("tests/elastic/test_launchers.py::test_as_a_single_process"),
    "horovodrun -np 2 --min-np 1 --max-np 8 --network-interfaces eth0 "
    '--host-discovery-script "discovery_scripts/from_file hosts.txt" python train.py': By(OVER_SSH),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_file hosts.txt" python train.py': By(OVER_SSH),
    "horovodrun -np 2 --min-np 1 --max-np 8 --network-interfaces eth0 "
    '--host-discovery-script "discovery_scripts/from_ec2 --tag job=resnet50" python train.py': By(ON_EC2),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_ec2 --tag job=resnet50" python train.py':
        By(ON_EC2),
    "discovery_scripts/from_ec2 --tag job=resnet50 --region eu-central-1": Here(prints="{instance}:1"),
    "discovery_scripts/from_auto_scaling resnet50 --region eu-central-1": By(BY_SUITE),
    "discovery_scripts/from_google resnet50 --region us-central1":
        By("tests/contract/test_discovery_google.py::test_a_regional_group_of_google_has_instances_in_several_zones"),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_auto_scaling resnet50" python train.py':
        By(READ_BY_HOROVOD),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_google resnet50" python train.py':
        By(READ_BY_HOROVOD),
    "discovery_scripts/from_kubernetes app=trainer --namespace training": By(BY_SUITE),
    "discovery_scripts/from_url https://hosts.example.com/job-7 --token-file token": By(BY_SUITE),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_kubernetes app=trainer" python train.py':
        By(READ_BY_HOROVOD),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_mpijob" python train.py': By(READ_BY_HOROVOD),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_slurm" python train.py': By(READ_BY_HOROVOD),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_leases /shared/job-7/hosts" python train.py':
        By(READ_BY_HOROVOD),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_url https://hosts.example.com/job-7" '
    "python train.py": By(READ_BY_HOROVOD),
    "horovodrun ... --host-discovery-script \"discovery_scripts/from_source 'union(ec2:tag=job=7, file:spare.txt)'\" "
    "python train.py": By(READ_BY_HOROVOD),
    "edlrun -np 2 --min-np 1 --preflight --discover file:hosts.txt python train.py":
        # Two names of one busy machine may differ by more than two machines of a kind.
        Here(swaps=(("hosts.txt", "local.txt"), ("--preflight", "--preflight-bound 20")), prints="the preflight: cpu"),
    "python -m edl_hvd.preflight": Here(prints="GFLOP/s in a matrix product"),
    'edlrun -np 2 --min-np 1 --discover "limit(union(file:hosts.txt, file:spare.txt), 8)" python train.py':
        Here(swaps=(("hosts.txt", "local.txt"), ("spare.txt", "local.txt")), prints="finished on rank 0 of 2"),
    'edl-hvd discover "limit(union(file:hosts.txt, file:local.txt), 8)"': Here(prints="4 hosts, 8 slots"),
    "edl-hvd doctor --kubernetes": By("tests/kubernetes/test_doctor_kubernetes.py::test_the_doctor_shows_it"),
    "edl-hvd doctor --discover file:hosts.txt": Here(prints="3 hosts, 9 slots"),
    "edl-hvd hosts file:hosts.txt": Here(prints="node-2:4"),
    "edl-hvd hosts --scripts": Here(prints="discovery_scripts"),
    "edl-hvd lease s3://bucket/job-7/hosts --slots 8":
        By("tests/unit/discovery/test_leases.py::test_the_command_holds_a_lease_until_it_is_ended"),
    "grep -v node-2 hosts.txt > hosts.part && mv hosts.part hosts.txt": Here(more="&& grep -c . hosts.txt", prints="2"),
    "rm -f plan.started": Here(),
    "horovodrun -np 1 --min-np 1 --max-np 2 --network-interfaces lo --host-discovery-script "
    '"discovery_scripts/from_schedule plan.txt --start-file plan.started" python train.py':
        Here(more="&& test -e plan.started", prints="finished on rank 0 of 1"),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_schedule plan.txt" python train.py': By(IN_ANOTHER),
    "edl-hvd simulate --trace examples/traces/spot-day.csv --picture spot-day.png":
        Here(more="&& test -s spot-day.png", prints="stock Horovod elastic"),
    "edl-hvd simulate --trace spot.csv --checkpoint-cost 2s --resize-cost 0.3s --price 0.92":
        Here(swaps=(SPOT,), prints="per useful host-hour"),
    "edl-hvd simulate --trace spot.csv --costs runs/resnet50/events.jsonl --json":
        By("tests/contract/test_simulate_command.py::test_costs_come_from_an_event_log_and_flags_beat_it"),
    "edl-hvd simulate cluster --workload workloads/workload-6.csv --policy ranked,tiresias --picture w.png":
        By("tests/contract/test_simulate_cluster_command.py::test_the_table_and_the_picture_are_for_people"),
    "edl-hvd simulate cluster --workload workloads/workload-6.csv --costs own --json":
        By("tests/contract/test_simulate_cluster_command.py::test_the_document_holds_every_job"),
    "edl-hvd simulate cluster --workload elasticflow/cluster03.csv --hosts 96 --slots 8 --policy ranked,fifo":
        By("tests/contract/test_simulate_cluster_command.py::"
           "test_a_recorded_trace_says_what_is_assumed_of_its_jobs"),
    "python benchmarks/cluster.py shared/data/cluster/pollux runs/cluster":
        By("tests/contract/test_simulate_cluster_command.py::test_the_benchmark_plays_each_workload_once"),
    "python benchmarks/cluster_kinds.py sia-artifact runs/kinds":
        By("tests/contract/test_cluster_kinds.py::test_each_play_adds_its_row_once"),
    "python benchmarks/cluster_months.py shared/data/cluster runs/months":
        By("tests/contract/test_cluster_months.py::test_each_play_is_made_once"),
    "python benchmarks/cluster_services.py openb runs/services --every 1,80,100,120":
        By("tests/contract/test_cluster_services.py::test_services_come_first_and_jobs_use_what_they_leave"),
    "python benchmarks/cluster_sweeps.py shared/data/cluster/pollux runs/sweeps":
        By("tests/contract/test_cluster_sweeps.py::test_one_of_three_is_varied_at_a_time"),
    "python benchmarks/edl_api_server.py runs/edl-api":
        By("tests/kubernetes/test_edl_services.py::test_jobs_and_services_share_nodes_and_few_requests_are_made"),
    "python benchmarks/edl_cases.py runs/edl":
        Here(more="--cases services --leave 2 --placing spread --told blind",
             prints="'utilisation': 86.05, 'jain': 0.9947, 'services_whole_s': '5 7 7', 'below_least': 0"),
    "edl-hvd trace generate --hosts 64 --hours 24 --seed 5 --output spot-day.csv":
        Here(more="&& cmp spot-day.csv examples/traces/spot-day.csv && echo the same", prints="the same"),
    "horovodrun -np 1 --min-np 1 --max-np 3 --network-interfaces lo --host-discovery-script "
    '"discovery_scripts/from_trace spot.csv --divide 20 --speed 20 --start-file spot.started '
    '--hosts localhost:1,127.0.0.1:1,127.1:1" python train.py':
        Here(swaps=(SPOT,), more="&& test -e spot.started", prints="finished on rank 0 of"),
    'horovodrun ... --host-discovery-script "discovery_scripts/from_trace spot.csv --speed 20" python train.py':
        By(IN_ANOTHER),
    "python examples/distill/images.py --data DATA --arch resnet50 --labels-only --save runs/distill/teacher.pt":
        By(IMAGES),
    "edl-hvd teach examples/distill/images.py:build": By(IMAGES),
    "edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/images.py "
    "--data DATA --arch resnet18":
        By(IMAGES),
    "edl-hvd teach examples/distill/digits.py:build --devices cpu,cpu":
        By("tests/unit/distill/test_distill_teach.py::test_teach_serves_a_file_and_teachers_shows_it"),
    "edlrun -np 2 --min-np 1 --teachers file:teachers.txt python examples/distill/digits.py":
        By("tests/unit/distill/test_distill_example.py::test_the_commands_of_the_document"),
    "edl-hvd teachers file:teachers.txt":
        By("tests/unit/distill/test_distill_example.py::test_the_commands_of_the_document"),
    "edl-hvd teach teacher.py:build --token-file token.txt --tls-cert cert.pem --tls-key key.pem":
        By("tests/unit/distill/test_distill_tls.py::test_the_command_lines_speak_tls"),
    "EDL_HVD_TEACHERS_TLS_CA=ca.pem edl-hvd teachers file:teachers.txt --token-file token.txt":
        By("tests/unit/distill/test_distill_tls.py::test_the_command_lines_speak_tls"),
    "edl-hvd teachers oip:http://node-4:8000/resnet":
        By("tests/unit/distill/test_distill_inference.py::test_teachers_shows_what_servers_say"),
    "edlrun -np 2 --teachers oip:http://node-4:8000/resnet,http://node-5:8000/resnet?requests=8 python train.py":
        By("tests/unit/distill/test_distill_inference.py::"
           "test_edlrun_tells_its_workers_of_servers_and_refuses_what_names_none"),
    "head -c 24 /dev/urandom | base64 > token.txt": By(GUIDE),
    "python examples/distill/text.py --epochs 1": By(GUIDE),
    "edl-hvd teach examples/distill/text.py:build --token-file token.txt": By(GUIDE),
    r"printf 'node-2:1\nnode-3:1\n' > teachers.txt": By(GUIDE),
    "EDL_HVD_TEACHERS_TOKEN_FILE=token.txt edl-hvd teachers file:teachers.txt": By(GUIDE),
    "EDL_HVD_TEACHERS_TOKEN_FILE=token.txt edlrun -np 2 --min-np 1 --teachers file:teachers.txt "
    "python examples/distill/text.py": By(GUIDE),
    "python benchmarks/distill_scale.py --histories 100000":
        Here(more="--histories 50", prints="each micro-batch once, in order"),
    "python benchmarks/distill_scale.py":
        Here(more="--scenes '8 students, 40 teachers' --picture scale.png && test -s scale.png",
             prints="| 8 students, 40 teachers | "),
    "python benchmarks/discovery.py": Here(more="2", prints="from_ec2, first poll"),
    "python examples/imagenet/show.py events.jsonl --picture report.png":
        By("tests/elastic/test_distill.py::test_the_report_of_a_job_shows_its_teachers"),
    "python benchmarks/distill_resize.py":
        Here(more="--rounds 1 --kills 1 --samples 240", prints="a world forms again, more than without teachers",
             waits=True),
    "python benchmarks/distill.py":
        Here(more="--goals scenes start --scenes service co-located --rounds 1 --short",
             prints="a teacher listens"),
    "python benchmarks/distill_digits.py":
        Here(more="--seeds 2 --teacher-epochs 1 --long-epochs 1 --epochs 3 9", prints="| three, averaged | 9 | 4 |"),
    "python benchmarks/distill_wire.py": Here(more="--rounds 1", prints="| Unix, messages |"),
    "python benchmarks/checksum.py": Here(more="--size-mb 32 --turns 1", prints="GB/s of a core"),
    "python benchmarks/recovery.py --engines edlrun --kills 400":
        Here(more="--kills 3", prints="kills under edlrun; seconds until every survivor"),
    "python benchmarks/death_watch.py": Here(more="--megabytes 1 --runs 2", prints="held: median"),
    "python benchmarks/world_start.py --worlds 100 --deaths 70 --strangers":
        Here(more="--worlds 3 --deaths 2 --ranks 2", prints="0 run anew"),
    "python benchmarks/join.py --launchers edlrun --start-up 3":
        Here(more="--worlds 1-2 --kinds trained --sizes 1 --runs 1 --start-up 0", prints="1-2      1 MB trained"),
    "python benchmarks/real_jobs.py runs/real-jobs":
        Here(more="--epochs 1 --claims 1 --scenes three", prints="6 of 6 jobs with each sample once per epoch",
             waits=True),
    "python benchmarks/resnet50.py":
        Here(more="--device cpu --image-size 32 --batch 4 --micro-batch 2 --steps 1 --rounds 1 --ways plain edlrun",
             prints="ResNet-50 on CPU"),
    "python benchmarks/broken_sums.py": Here(more="--trials 2", prints="2 deaths; survivors that"),
    "python benchmarks/sampler.py": Here(more="--small 100000 --shard-samples 10", prints="4 x 8, ten changes of the"),
    # All of it takes half an hour. Here: one row of it, without the launchers that hang.
    "python benchmarks/faults.py": Here(more="--cases single --launchers edlrun", prints="well"),
    "python examples/imagenet/train.py --data /data/imagenet": Here(swaps=(DIGITS,), more=SHORT),
    "horovodrun -np 2 --min-np 1 --max-np 8 --network-interfaces eth0 "
    '--host-discovery-script "discovery_scripts/from_file hosts.txt" '
    "python examples/imagenet/train.py --data /data/imagenet --checkpoint s3://bucket/resnet50":
        Here(swaps=(DIGITS, ON_LOOPBACK, ("s3://bucket", "s3://{bucket}"), ("hosts.txt", "local.txt")), more=SHORT),
    # CI runs the demo to its end, on digits. Here: that the flags reach train.py's, and the folder the program.
    "python examples/imagenet/demo.py --data /data/imagenet -- --arch resnet18 --epochs 5":
        Here(swaps=(DIGITS,), more="--micro-batch 0", prints="--micro-batch", exit_code=2),
    "DATA=/data/imagenet make imagenet-demo":
        Here(swaps=(("/data/imagenet", "/no/such/folder"),), more=INSTALLED, prints="/no/such/folder", exit_code=2),
    "make test PYTEST_ARGS='tests/unit/data/test_sampler.py -k resize'": COLLECTS,
    "make test-chaos CHAOS_ARGS='--chaos-seeds 20'": COLLECTS,
    "make test PYTEST_ARGS='tests/contract --crash-seeds 1000'": COLLECTS,
    "make test PYTEST_ARGS='tests/idioms/test_idioms.py -k wherever --fault-seeds 100'": COLLECTS,
    "make test PYTEST_ARGS='tests/elastic --stock -rx'": COLLECTS,
}  # fmt: skip
