// A Kaitai Struct description as JSON on stdin, its Python parser as {file: text} on stdout. Run where kaitai-struct-compiler is installed.
const compiler = require(require.resolve("kaitai-struct-compiler", { paths: [process.cwd()] }));
let text = "";
process.stdin.on("data", (part) => (text += part)).on("end", () => {
  compiler.compile("python", JSON.parse(text), null, false).then(
    (files) => process.stdout.write(JSON.stringify(files)),
    (error) => {
      console.error(String(error));
      process.exit(1);
    },
  );
});
