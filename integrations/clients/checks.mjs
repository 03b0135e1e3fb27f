// What the scripts of Node.js share, as checks.py does for Python: where the server is, and a line for each feature.
export const { BASE_URL, MODEL } = process.env;
export const OPENAI = `${BASE_URL}/v1`;
export const ASKED = "Ann is 31 years old and lives in Rome. Who is she, and how old?";
export const PERSON = {
  type: "object",
  properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 150 } },
  required: ["name", "age"],
  additionalProperties: false,
};

// Runs a feature of a client, and prints whether it works: it returns something true and throws nothing.
export async function check(name, feature) {
  try {
    const found = await feature();
    console.log(found ? `ok ${name}` : `failed ${name}: returned ${found}`);
  } catch (error) {
    console.error(error);
    console.log(`failed ${name}: ${String(error.message).replaceAll("\n", " ").slice(0, 160)}`);
  }
}
