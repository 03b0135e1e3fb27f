// Light or dark, before the first paint. Not a module: those run after it.
"use strict";
(() => {
  const THEMES = ["auto", "light", "dark"];
  const KEPT = "blendserve-theme";
  let theme = "auto";
  try {
    theme = localStorage.getItem(KEPT) ?? "auto";
  } catch {
    // a browser that keeps nothing: as its owner's system has it
  }

  function apply() {
    if (!THEMES.includes(theme)) theme = "auto";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => (button.textContent = `Theme: ${theme}`);
    label();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      apply();
      label();
      try {
        localStorage.setItem(KEPT, theme);
      } catch {
        // then for this page alone
      }
    });
  });
})();
