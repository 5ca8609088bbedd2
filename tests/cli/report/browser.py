"""A headless Chromium that is driven through a pair of pipes, with Python's standard library only."""
import base64
import json
import os
import shutil
import subprocess
import tempfile


def find():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One open page: its console's errors are collected in `errors`."""

    def __init__(self, program, file, width, height=900, dark=False):
        self.profile = tempfile.mkdtemp()
        to_browser, self.out = os.pipe()
        self.into, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--user-data-dir=" + self.profile, "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "_", *command],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session, self.errors, self.requests = b"", 0, None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.set_dark(dark)
        self.call("Page.navigate", url="file://" + os.path.abspath(file))
        self.wait_for("document.readyState === 'complete' && document.title !== ''")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(20)
        except Exception:
            self.process.kill()
            self.process.wait()
        for pipe in (self.out, self.into):
            os.close(pipe)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.note(answer)

    def read(self):
        while b"\0" not in self.buffer:
            block = os.read(self.into, 1 << 20)
            if not block:
                raise RuntimeError("the browser has ended")
            self.buffer += block
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def note(self, event):
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(expression + ": " + str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, condition):
        for _ in range(400):
            if self.value(condition):
                return
            self.value("new Promise(done => setTimeout(done, 50))")
        raise RuntimeError("never true: " + condition)

    def set_dark(self, dark):
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x0, y, x1):
        at = lambda kind, x, buttons: self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                                                buttons=buttons, clickCount=1)
        self.move(x0, y)
        at("mousePressed", x0, 1)
        at("mouseMoved", (x0 + x1) / 2, 1)
        at("mouseMoved", x1, 1)
        at("mouseReleased", x1, 0)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else "")

    def picture(self, file, whole=True):
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 9000), "scale": 1}
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": clip} if whole else {}))
        with open(file, "wb") as out:
            out.write(base64.b64decode(picture["data"]))

    def pdf(self, file):
        with open(file, "wb") as out:
            out.write(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))
