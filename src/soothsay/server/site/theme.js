// Before the first paint, so that the page does not flash in the other colours. Not a module: those come later.
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
