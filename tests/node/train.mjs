// Trains the artifacts in a folder with onnxruntime-node, which knows nothing of the plugin.
//
//   NODE_PATH=.../node_modules node train.mjs FOLDER LEARNING_RATE
//
// FOLDER holds training_model.onnx, optimizer_model.onnx, checkpoint, and batches.safetensors with the tensors
// `<step>/<input>`. Writes the losses to standard output, as JSON.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const ort = createRequire(import.meta.url)("onnxruntime-node");

const ARRAYS = { F32: ["float32", Float32Array], I64: ["int64", BigInt64Array] };
const ZEROS = { float32: Float32Array, int64: BigInt64Array };

function readSafetensors(path) {
  const file = readFileSync(path);
  const headerLength = Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.toString("utf8", 8, 8 + headerLength));
  delete header.__metadata__;
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(header)) {
    const [type, TypedArray] = ARRAYS[dtype];
    // A copy: a typed array must begin at a multiple of its element's size.
    const bytes = Uint8Array.from(file.subarray(8 + headerLength + begin, 8 + headerLength + end));
    tensors[name] = new ort.Tensor(type, new TypedArray(bytes.buffer), shape);
  }
  return tensors;
}

function withPrefix(tensors, prefix) {
  const found = Object.entries(tensors).filter(([name]) => name.startsWith(prefix));
  return Object.fromEntries(found.map(([name, tensor]) => [name.slice(prefix.length), tensor]));
}

function zeros({ type, shape }) {
  return new ort.Tensor(type, new ZEROS[type](shape.reduce((product, size) => product * size, 1)), shape);
}

function pick(names, ...sources) {
  const all = Object.assign({}, ...sources);
  return Object.fromEntries(names.map((name) => [name, all[name]]));
}

const [folder, learningRate] = process.argv.slice(2);
const training = await ort.InferenceSession.create(join(folder, "training_model.onnx"));
const optimizer = await ort.InferenceSession.create(join(folder, "optimizer_model.onnx"));
const batches = readSafetensors(join(folder, "batches.safetensors"));
const learning_rate = new ort.Tensor("float32", [Number(learningRate)], []);

// Everything that the optimizer gives a new value: parameters from the checkpoint, its own state from zeros.
const state = withPrefix(readSafetensors(join(folder, "checkpoint")), "parameters/");
for (const input of optimizer.inputMetadata) {
  if (optimizer.outputNames.includes(`${input.name}_updated`)) {
    state[input.name] ??= zeros(input);
  }
}

const losses = [];
for (let step = 0; ; step++) {
  const batch = withPrefix(batches, `${step}/`);
  if (Object.keys(batch).length === 0) {
    break;
  }
  const results = await training.run(pick(training.inputNames, state, batch));
  losses.push(results.loss.data[0]);
  const updated = await optimizer.run(pick(optimizer.inputNames, state, results, { learning_rate }));
  for (const name of Object.keys(state)) {
    state[name] = updated[`${name}_updated`] ?? state[name];
  }
}
console.log(JSON.stringify(losses));
