"""Google Cloud Storage in one process, for the two ways that Orbax reaches it: files through fsspec, arrays over HTTP.

    python tests/support/fake_gcs.py SCRIPT

runs a script whose `gs://` paths lie in memory. tensorstore reads the address of the storage once, from the
environment, so the script gets a process of its own.
"""

import http.server
import json
import os
import runpy
import sys
import threading
import types
from urllib import parse

import fsspec
from fsspec.implementations import memory


class Storage(memory.MemoryFileSystem):
    """What gcsfs is to fsspec: the files of all buckets, by `/bucket/name`."""

    protocol = ("gcs", "gs")
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("gs://").strip("/") if path.strip("/") else ""

    def __init__(self, *args, finalize_on_close=None, **kwargs):
        super().__init__(*args, **kwargs)


class Server(http.server.BaseHTTPRequestHandler):
    """The requests that tensorstore sends."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of each answer waits 40 ms for the headers' acknowledgement
    generations: dict = {}  # noqa: RUF012

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def asked(self):
        """(bucket, name or None, query)."""
        url = parse.urlsplit(self.path)
        parts = url.path.removeprefix("/upload").removeprefix("/storage/v1/b/").split("/", 2)
        query = {name: values[0] for name, values in parse.parse_qs(url.query).items()}
        return parts[0], parse.unquote(parts[2]) if len(parts) > 2 else None, query

    def about(self, bucket, name):
        file = Storage.store[f"/{bucket}/{name}"]
        generation = self.generations.setdefault(f"/{bucket}/{name}", 1)
        return {"name": name, "bucket": bucket, "generation": str(generation), "size": str(len(file.getvalue()))}

    def do_GET(self):
        bucket, name, query = self.asked()
        if name is None:
            prefix = f"/{bucket}/"
            names = sorted(x.removeprefix(prefix) for x in list(Storage.store) if x.startswith(prefix))
            names = [x for x in names if x.startswith(query.get("prefix", "")) and x >= query.get("startOffset", "")]
            names = [x for x in names if not query.get("endOffset") or x < query["endOffset"]]
            return self.reply(200, json.dumps({"items": [self.about(bucket, x) for x in names]}).encode())
        if f"/{bucket}/{name}" not in Storage.store:
            return self.reply(404)
        about, data = self.about(bucket, name), Storage.store[f"/{bucket}/{name}"].getvalue()
        if query.get("alt") != "media":
            return self.reply(200, json.dumps(about).encode())
        if query.get("ifGenerationNotMatch") == about["generation"]:
            return self.reply(304)
        headers = {"x_goog_generation": about["generation"]}
        start, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not start and not end:
            return self.reply(200, data, **headers)
        first = int(start) if start else len(data) - int(end)
        last = min(int(end), len(data) - 1) if start and end else len(data) - 1
        headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.reply(206, data[first : last + 1], **headers)

    def do_POST(self):
        bucket, _, query = self.asked()
        data, name = self.rfile.read(int(self.headers["Content-Length"])), query["name"]
        path = f"/{bucket}/{name}"
        wanted = query.get("ifGenerationMatch")
        there = str(self.generations.setdefault(path, 1)) if path in Storage.store else "0"
        if wanted is not None and wanted != there:
            return self.reply(412)
        with fsspec.filesystem("gcs").open(f"gs://{bucket}/{name}", "wb") as file:
            file.write(data)
        self.generations[path] = self.generations.get(path, 0) + 1
        return self.reply(200, json.dumps(self.about(bucket, name)).encode())

    def do_DELETE(self):
        bucket, name, _ = self.asked()
        there = Storage.store.pop(f"/{bucket}/{name}", None)
        self.reply(404 if there is None else 204)


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "none"  # tensorstore looks for no credentials
    fsspec.register_implementation("gcs", Storage, clobber=True)
    # Orbax asks this package, of the bucket, only whether it has folders.
    bucket = types.SimpleNamespace(hierarchical_namespace_enabled=False)
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda: types.SimpleNamespace(get_bucket=lambda name: bucket)
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    sys.modules |= {"google.cloud": cloud, "google.cloud.storage": storage}
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
