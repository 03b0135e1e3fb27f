// Light or dark theme, set before the first paint. Not a module, because modules run later.
"use strict";
(() => {
  const THEMES = ["auto", "light", "dark"];
  const KEPT = "blendserve-theme";
  let theme = "auto";
  try {
    theme = localStorage.getItem(KEPT) ?? "auto";
  } catch {
    // storage is blocked: use the system's theme
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
        // storage is blocked: the choice holds for this page only
      }
    });
  });
})();
