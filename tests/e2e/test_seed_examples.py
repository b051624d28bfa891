# SPDX-License-Identifier: Apache-2.0
"""The original's published examples, unchanged but for the import, the model and the port, as scripts of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import unused_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deployments")]

PIPELINE = """
import mii_zmq as mii

pipe = mii.pipeline(MODEL)

result = pipe(["DeepSpeed is", "Seattle is"], max_length=128)
for r in result:
    print(repr(r.generated_text))
"""

SERVE = """
import mii_zmq as mii

client = mii.serve(
    MODEL,
    tensor_parallel=1,
    replica_num=2,
    deployment_name="mistral-deployment"
)

result = client.generate(["DeepSpeed is"], max_length=128)
print(repr(result[0].generated_text))

client.terminate_server()
"""

SERVE_REST = """
import mii_zmq as mii

client = mii.serve(
    MODEL,
    deployment_name="mistral-deployment",
    enable_restful_api=True,
    restful_api_port=PORT,
)
"""

CLIENT = """
import mii_zmq as mii

client = mii.client("mistral-deployment")

result = client.generate(["Hello, my name is"], max_length=128)
print(repr(result[0].generated_text))
"""

REST = """
import json
import urllib.request

url = "http://localhost:PORT/mii/mistral-deployment"
params = {"prompts": ["DeepSpeed is", "Seattle is"], "max_length": 128}
request = urllib.request.Request(url, data=json.dumps(params).encode(), headers={"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request)))
"""

CURL = """
curl --silent --header "Content-Type: application/json" \\
  --request POST \\
  -d '{"prompts": ["DeepSpeed is", "Seattle is"], "max_length": 128}' \\
  http://localhost:PORT/mii/mistral-deployment
"""

TERMINATE = 'import mii_zmq as mii\nmii.client("mistral-deployment").terminate_server()\n'


def run_script(text: str, model: Path, port: int = 0) -> str:
    script = text.replace("MODEL", repr(str(model))).replace("PORT", str(port))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pipeline(tiny_model: Path) -> None:
    assert len(run_script(PIPELINE, tiny_model).splitlines()) == 2


def test_serve_with_two_replicas(tiny_model: Path) -> None:
    assert len(run_script(SERVE, tiny_model).splitlines()) == 1


def test_serve_with_a_rest_gateway_outlives_its_script(tiny_model: Path) -> None:
    port = unused_port()
    try:
        run_script(SERVE_REST, tiny_model, port)
        assert len(run_script(CLIENT, tiny_model).splitlines()) == 1
        answers = [run_script(REST, tiny_model, port).replace("'", '"')]
        if shutil.which("curl"):
            answers.append(subprocess.check_output(["sh", "-c", CURL.replace("PORT", str(port))], text=True))
        for answer in answers:
            assert answer.count("generated_text") == answer.count("finish_reason") == 2
        assert [item["prompt_length"] for item in json.loads(answers[-1])] == [12, 10]
    finally:
        run_script(TERMINATE, tiny_model)
