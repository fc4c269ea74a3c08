"""A server of S3's protocol that demands credentials, and a proxy in front of it whose network can be made bad."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import BIN
from running import free_port

ALLOWED = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
SETUP_CALLS = 4  # requests without a check of credentials: user, key, policy, bucket


@contextlib.contextmanager
def object_storage(directory, bucket):
    """Yields the `Proxy` to a running server with a bucket, and the environment with a user's key for it."""
    import botocore.session

    address = f"127.0.0.1:{free_port()}"
    env = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": str(SETUP_CALLS)}
    with open(directory / "storage.log", "w") as log:
        command = [BIN / "python", "-m", "moto.server", "-p", address.rpartition(":")[2]]
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address.split(":"), timeout=5):
                break
            assert time.monotonic() < deadline and server.poll() is None, (directory / "storage.log").read_text()
            time.sleep(0.1)

        def client(service, key="none", secret="none"):
            session = botocore.session.get_session()
            session.set_credentials(key, secret)
            return session.create_client(service, region_name="us-east-1", endpoint_url=f"http://{address}")

        iam = client("iam")
        iam.create_user(UserName="trainer")
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=json.dumps(ALLOWED))
        client("s3").create_bucket(Bucket=bucket)
        with Proxy(address) as proxy:
            keys = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
            yield proxy, keys | {"AWS_ENDPOINT_URL": proxy.url, "AWS_DEFAULT_REGION": "us-east-1"}
    finally:
        server.kill()
        server.wait()


class Proxy:
    """An HTTP proxy whose attributes, which may be changed at any time, say how bad the network is.

    fail_every: of so many requests one fails, in turn with an answer 503, without an answer, and after half of its
    body. delay: seconds before each request. is_down: all connections are closed. on_put: called with the path of each
    upload, before it reaches the server.
    """

    def __init__(self, server):
        self.server, self.requests, self.failed, self.log = server, 0, 0, []
        self.fail_every, self.delay, self.is_down, self.on_put = 0, 0.0, False, None
        self.lock, proxy = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self):
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def log_message(self, *_):
                pass

            def do_GET(self):
                proxy.forward(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def forward(self, request):
        with self.lock:
            self.requests += 1
            fails = self.fail_every and self.requests % self.fail_every == 0
            self.failed += bool(fails)
            way = self.failed % 3
        time.sleep(self.delay)
        length = int(request.headers.get("Content-Length", 0))
        if self.is_down or (fails and way == 1):
            request.rfile.read(length // 2)
            return self.cut(request)
        body = request.rfile.read(length)
        if fails and way == 2:
            self.log.append(f"503 {request.command} {request.path}")
            request.send_response(503)
            request.send_header("Content-Length", "0")
            return request.end_headers()
        if request.command == "PUT" and self.on_put:
            self.on_put(request.path)
        self.log.append(f"{request.command} {request.path}")
        server = http.client.HTTPConnection(self.server, timeout=60)
        server.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            server.putheader(name, value)
        server.endheaders(body)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if fails:  # the request was carried out, and nobody hears of it
            return self.cut(request)
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                request.send_header(name, value)
        head_length = answer.getheader("Content-Length") if request.command == "HEAD" else None
        request.send_header("Content-Length", head_length or str(len(content)))
        request.end_headers()
        request.wfile.write(content)
        return None

    def cut(self, request):
        request.close_connection = True
        with contextlib.suppress(OSError):
            request.connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
