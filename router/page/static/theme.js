// Loaded before anything is drawn, so that a theme once chosen does not flash in the other's colours.

const root = document.documentElement;
if (localStorage.theme) root.dataset.theme = localStorage.theme;

addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    localStorage.theme = root.dataset.theme = isDark ? "light" : "dark";
  });
});
