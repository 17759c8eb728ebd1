// A product of matrices by gRPC, from JavaScript: npm install @grpc/grpc-js @grpc/proto-loader, then, from the root of
// the repository:
//
//   node examples/grpc/node/main.js unix:/path/of/the.sock          (or 127.0.0.1:50051)
"use strict";
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const root = path.join(__dirname, "..", "..", "..", "proto");
const files = ["dispatch", "memory"].map((name) => `tilewright/v1/${name}.proto`);
// Every id is a whole number that a double holds, so 64-bit numbers can be numbers here.
const options = { includeDirs: [root], keepCase: true, longs: Number, enums: String, oneofs: true };
const definition = loader.loadSync(files, options);
const { v1 } = grpc.loadPackageDefinition(definition).tilewright;

const address = process.argv[2] || "127.0.0.1:50051";
const credentials = grpc.credentials.createInsecure();
const memory = new v1.Memory(address, credentials);
const dispatch = new v1.Dispatch(address, credentials);

function input(name, shape, values) {
  return { name, spec: { dtype: "FP32", shape }, location: { inline: Buffer.from(values.buffer) } };
}

const fail = (text) => { console.error(text); process.exit(1); };

// The session lives as long as this stream. What it owns (regions, buffers, plans) ends with it.
const lease = memory.OpenSession({ client_name: "examples/grpc/node" });
let done = false;
lease.on("error", (error) => { if (!done) fail(`no session: ${error.message}`); });
lease.once("data", (event) => {
  const [m, n, k] = [5, 7, 9];
  const a = Float32Array.from({ length: m * k }, (_, i) => (i % 5) - 2);
  const b = Float32Array.from({ length: k * n }, (_, i) => (i % 7) - 3);
  const request = {
    session: event.opened.session,
    operation: "gemm",
    inputs: [input("a", [m, k], a), input("b", [k, n], b)],
    attributes: { unary: { text: "Relu" } },
  };
  dispatch.Run(request, (error, reply) => {
    if (error) fail(`refused: ${error.details}`);
    const bytes = reply.outputs[0].inline;
    for (let i = 0; i < m * n; i++) {
      let sum = 0;
      for (let j = 0; j < k; j++) sum += a[Math.floor(i / n) * k + j] * b[j * n + (i % n)];
      const found = bytes.readFloatLE(4 * i);
      if (Math.abs(found - Math.max(sum, 0)) > 1e-4) fail(`wrong at ${i}: ${found}`);
    }
    console.log(`${m} x ${n} is right, by ${reply.report.kernels[0]} on ${reply.report.device}`);
    done = true;
    lease.cancel();
    memory.close();
    dispatch.close();
  });
});
