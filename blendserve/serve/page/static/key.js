// The API key, where the server wants one. It is kept in this tab alone.

const KEPT = "blendserve-key";
let asking = null;

export function key() {
  return sessionStorage.getItem(KEPT) ?? "";
}

export function forgetKey() {
  sessionStorage.removeItem(KEPT);
  show();
}

/** Ask for one, once however many requests want it -> whether there is one now. `refused`: the one that was no good. */
export function askForKey(refused) {
  if (key() !== refused) return Promise.resolve(true); // somebody has given another one meanwhile
  asking ??= ask(refused).finally(() => (asking = null));
  return asking;
}

export function show() {
  document.getElementById("forget-key").hidden = !key();
}

function ask(refused) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-problem").textContent = refused ? "The server does not know this key." : "";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "cancel" ? "" : input.value.trim();
        input.value = "";
        if (given) sessionStorage.setItem(KEPT, given);
        show();
        resolve(given !== "");
      },
      { once: true },
    );
  });
}
